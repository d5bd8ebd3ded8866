"""Reader of shell scripts that runs nothing: expands variables, arrays, conditions and loops from the script alone.

It uses only the standard library, like everything that runs before a training starts. Existing parsers of bash are
licensed under the GPL (bashlex) or compiled (tree-sitter-bash), and none of them expands words: the interpreter would
stay, and their tree would have to be translated into its own.
"""

from megapar.tools.translation.shell.run import Commands, read
from megapar.tools.translation.shell.words import SyntaxProblem

__all__ = ["Commands", "SyntaxProblem", "read"]
