"""A reader of shell scripts that runs nothing: variables, arrays, conditions and loops, as far as a script holds them.

Standard library only, as all that answers before a run starts: parsers of bash are under the GPL or compiled, and none
of them says what a word comes to.
"""

from megapar.tools.translation.shell.run import Commands, read
from megapar.tools.translation.shell.words import SyntaxProblem

__all__ = ["Commands", "SyntaxProblem", "read"]
