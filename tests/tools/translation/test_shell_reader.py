"""The reader of shell scripts: what a script's commands come to without running any."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megapar.tools.translation import open_values, shell


def commands(text: str, *positional: str, **assigned: str) -> list[tuple[str, ...]]:
    return [words for _, words in shell.read(text, assigned, positional).commands]


def said(text: str, *positional: str) -> list[list[str]]:
    return [[open_values.as_written(word) for word in words] for words in commands(text, *positional)]


# Each is also run by bash below, with `run` printing its words.
HELD = {
    "words": "run a 'b c' \"d e\" f\\ g",
    "continued": "run a \\\n  b \\\n  c",
    "variable": 'A=1; B="$A 2"; run $B "$B" ${A}x \'$A\'',
    "array": 'A=(--x 1 # why\n "--y 2"\n)\nA+=(z)\nrun ${A[@]} end\nrun "${A[@]}" ${#A[@]} ${A[1]}',
    "array of nothing": 'A=()\nrun a ${A[@]} "${A[@]}" b',
    "appended text": "A=a; A+=b; run $A",
    "blanks within": 'A=" --x 1  --y "; run $A; run "$A" ${A}z',
    "default": 'A=${A:-one}; B=${B-two}; C=; run $A $B ${C:-three} "${C-four}" ${A:+five}',
    "nested default": 'A=x; run ${B:-${A}-y} "${C:-"q r"}"',
    "arithmetic": "N=8; M=$((N * 4 / 3)); run $M $(( (N + 1) % 4 )) $((-7 / 2)) $((2 ** 10))",
    "trimmed": "F=dir/model.tar.gz; run ${F##*/} ${F%.gz} ${F%%.*} ${F#*/}",
    "if": "A=1\nif [ $A -eq 1 ]; then run yes; else run no; fi",
    "elif": "A=1\nif [[ $A == 2 || -n $B ]]; then run no; elif true; then run b; fi",
    "and or": "[ a = a ] && run one || run two\nfalse && run three\nfalse || run four",
    "not": "if ! [ a = b ]; then run c; fi\nif [[ ! -z x && a != b ]]; then run d; fi",
    "for": "for A in 1 2 $(true) 3; do run $A; done\nfor B in x y\ndo\nrun $B\ndone",
    "while": "I=0; while [ $I -lt 3 ]; do run $I; I=$((I + 1)); done",
    "case": "A=large; case $A in small|tiny) run s;; l*) run l;; *) run other;; esac",
    "function": "f() { run $1 $#; }\nfunction g { f $2 $1; }\ng a b",
    "local variable": "f() { local x=$1; run $x; g; }\ng() { typeset y=2; run $x$y; }\nx=5 y=6\nf 3\nrun $x $y",
    "global variable of a function": "f() { declare -g X=1; Y=2; }\nf\nrun $X $Y",
    "set": "set -- a b c; run $# $1; shift; run $@",
    "here document": "cat <<EOF > /dev/null\nrun a $B\nEOF\nrun b",
    "here document with quotes": "cat <<EOF > /dev/null\na \\\" b ' ( c\nEOF\nrun b",
    "redirected": "run a > /dev/null 2>&1\nrun b 2>&1 | cat\nrun c &> /dev/null < /dev/null",
    "prefix": "A=1 run b",
    "eval": "C=\"run a 'b c'\"; eval $C; eval run d\\;run e",
    "comment": "run a # b \\\nrun c#d",
    "continued comment": "run a \\\n  # b\nrun c",
    "group": "{ run a; run b; }; ( run c )",
    "string over lines": 'A="\n  --x 1 \\\n  --y 2\n"\nrun $A',
    "quotes in a string": "A=(\"--split '99,1,0'\"); run ${A[@]}",
    "continued within a word": "run a\\\nb \"c\\\nd\" --x=1\\\ne-4\\\n  'e \\\nf'",
    "continued behind nothing": "A=; run a $A\\\n  b",
    "arithmetic commands": "N=4; ((N *= 2)); (( N++ )); ((--N, M = N / 3)); let K=N*2 'K += 1'; run $N $M $K",
    "by another name": "A=B; B=x; run ${!A}",
    "exported": 'K=A; export "$K"="b c" "D=e"; run "$A" $D',
    "read": "B=x\nread -r -d '' A <<EOF\n--y $B\n  --z \"1\" \\\n --w\nEOF\nrun $A",
    "read as it stands": "B=x\nread -r -d '' C <<'EOF'\n$B\nEOF\nrun \"$C\"",
    "empty in a condition": '[ "$X" = 1 ] && run a\n[ "$X" = 1 ] || run b\n[ "$X" != 1 ] && run c',
    "unset": "A=1; unset A; run ${A:-gone}",
}


@pytest.mark.parametrize("name", HELD)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash to compare with")
    script = HELD[name].replace("$(true)", "")
    log = tmp_path / "words"
    prelude = f'run() {{ printf "%s\\0" "$#" "$@" >> {log}; }}\n'
    subprocess.run([bash, "-c", prelude + script], check=True, env={}, timeout=20)
    pieces = log.read_text().split("\0")[:-1]
    expected = []
    while pieces:
        count = int(pieces.pop(0))
        expected.append(("run", *(pieces.pop(0) for _ in range(count))))
    found = [words for words in commands(script) if words[0] == "run"]
    assert found == expected


def test_what_a_script_does_not_hold_is_marked() -> None:
    assert said("run $1 ${2:-two} $HOST `date` $(nproc) x/$NAME") == [
        ["run", "$1", "two", "$HOST", "`date`", "`nproc`", "x/$NAME"]
    ]
    (words,) = commands("run $1 x/$NAME plain")
    assert [open_values.is_open(word) for word in words] == [False, True, True, False]
    assert open_values.names(words[2]) == ["$NAME"]
    assert said("run $1 $2", "a b") == [["run", "a", "b", "$2"]]
    assert said("N=$((WORLD / 2)); run $N") == [["run", "$((WORLD / 2))"]]
    # A blank in what is open splits nothing, and a command that is read again keeps it.
    assert said('D=`pwd -P`; C="run $D/x --y"; eval $C') == [["run", "`pwd -P`/x", "--y"]]


def test_values_from_outside_stay() -> None:
    assert commands("NODES=1; run $NODES $HOME", NODES="4", HOME="/h") == [("run", "4", "/h")]


def test_an_unset_variable_is_empty_in_a_condition_and_other_open_ones_are_said() -> None:
    script = (
        'if [ -n "$KEY" ]; then run a; fi\nif [ -z "$KEY" ]; then run b; fi\nif [ `kind` = x ]; then run c; fi\n'
        '[ `kind` = x ] && run d\n[ "$KIND" = x ] && run e'
    )
    found = shell.read(script, {}, ())
    assert [words for _, words in found.commands] == [("run", "b")]
    assert found.remarks == (
        "line 3: a condition is assumed to be false; the script alone does not decide it",
        "line 4: a condition is assumed to be false; the script alone does not decide it",
        "line 5: $KIND is assumed to be empty in a condition; the script does not set it",
    )


@pytest.mark.parametrize(
    ("script", "remark"),
    [
        ('export "$KEY"="x"', "line 1: the name in $KEY=x is unknown: pass it as NAME=VALUE before --"),
        ("read A B <<EOF\nx y\nEOF", "line 1: the values read from the text after << are left open"),
    ],
)
def test_what_is_not_carried_out_is_said(script: str, remark: str) -> None:
    assert shell.read(script, {}, ()).remarks == (remark,)


def test_what_is_counted_in_another_way_is_left_open() -> None:
    assert said("N=4; ((N |= 1)); M=1; let M=K; run $N $M ${!N}") == [["run", "$N", "$((K))", "${!N}"]]


def test_lines_are_counted() -> None:
    found = shell.read("A=1\n\nrun a \\\n b\n'run' c\nX=(\n1\n)\nrun d", {}, ())
    assert [at for at, _ in found.commands] == [3, 5, 9]


def test_a_shell_in_a_line_is_read() -> None:
    found = commands('srun -N 2 bash -c "cd x; torchrun --nnodes $N pretrain_gpt.py --lr 1"', N="2")
    assert found[1] == ("srun", "-N", "2", "torchrun", "--nnodes", "2", "pretrain_gpt.py", "--lr", "1")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('run "a', "line 1: the quotation that begins here does not end"),
        ("run a\nif true; then run b", "line 2: fi is missing"),
        ("A=(1 2", "line 1: ) is missing"),
        ("run ${A", "line 1: ${ has no }"),
        ("run a\n)", "line 2: ) where a command is expected"),
        ("[[ a == b", "line 1: [[ has no end"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(script: str, message: str) -> None:
    with pytest.raises(shell.SyntaxProblem) as problem:
        commands(script)
    assert message in str(problem.value)


def test_nothing_is_run_and_nothing_goes_on_for_ever(tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert commands(f"touch {there}; $(touch {there}); f() {{ f; }}; f; while true; do run; done")
    assert not there.exists()


def test_the_number_of_an_unknown_list_is_unknown() -> None:
    nodes = "nodes=($(scontrol show hostnames x))\ntorchrun --nnodes ${#nodes[@]} ${#nodes} a.py"
    assert said(nodes) == [["torchrun", "--nnodes", "${#nodes[@]}", "${#nodes}", "a.py"]]
    assert said("A=$1\nif [ ${#A} -gt 0 ]; then run a; else run b; fi") == [["run", "b"]]
    assert said('H=("$A" "$B"); run ${#H[@]}') == [["run", "2"]]


def test_the_output_of_a_command_may_be_empty_or_not() -> None:
    for text in (
        '[ -n "$(nvidia-smi)" ] && run a || run b',
        'A=$(hostname)\nif [ -n "$A" ]; then run a; else run b; fi',
    ):
        found = shell.read(text, {}, ())
        assert [words for _, words in found.commands] == [("run", "b")]
        assert "a condition is assumed to be false" in found.remarks[0]
    assert said('[ -z "$X" ] && run a') == [["run", "a"]]


def test_a_local_variable_ends_with_its_call() -> None:
    assert said("f() { local z=1; run $z; }\nf\nrun a$z") == [["run", "1"], ["run", "a$z"]]
