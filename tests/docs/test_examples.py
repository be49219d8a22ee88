"""The scripts in examples/ run, and say what they are for."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HOWTO = ROOT / "docs/howto/train_from_python.md"
PRINTS = {
    "adapters": ["base: loss ", "tuned: loss ", " on fsdp=4,tensor=2"],
    "use_a_model": ["'12 is a ", "perplexity on other texts", "config.json", "model.safetensors"],
    "where_time_goes": ["the fastest of 8 steps", "attention", "idle"],
    "own_data": ["(12, "],
    "callback": ["step 1 is next, on data=8", "held-out loss", "interrupt"],
    "change_mesh": ["data=4", "fsdp=8"],
    "own_block": ["data=8 ", "they differ by 0.000", "on 8 H100s: mesh ", "7 is"],
    "own_loop": ["step 10: held-out loss ", " on data=8"],
    "own_loss": ["data=8 ", "pipe=2,fsdp=2,tensor=2 ", "they differ by 0.000"],
    "phases": ["step_time_s", "   6 ", "loss"],
    "remesh_live": ["step 4 on fsdp=4,tensor=2", "step 9 on pipe=2,data=4", " MB moved in "],
    "several_hosts": ["done on data=2,fsdp=4: "],
    "plan_a_cluster": [
        "1. ",
        "GiB predicted",
        "feed-forward",
        "activations",
        "deploy/slurm.sbatch --model llama3-8b",
        "--mesh ",
    ],
}
"""Some of what each of them prints."""


def test_each_example_is_listed_here():
    assert [path.stem for path in EXAMPLES] == sorted(PRINTS)


def test_the_page_lists_each_example_and_what_own_layers_and_losses_import():
    lists, stable = HOWTO.read_text(encoding="utf-8").split("## What is stable")
    assert [each.name for each in EXAMPLES if f"| `examples/{each.name}` |" not in lists] == []
    imported = {
        f"`{module.replace('.', '/')}.py`"
        for path in EXAMPLES
        for module in re.findall(
            r"^from optimus_jax\.([\w.]+) import", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    own_block = HOWTO.with_name("own_block.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\((`\w+/\w+\.py`)\)", own_block))
    assert set(re.findall(r"`\w+/\w+\.py`", stable)) == imported | named


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = example.read_text(encoding="utf-8")
    assert f"`python examples/{example.name}`" in (ast.get_docstring(ast.parse(text)) or "")
    code = None
    try:
        runpy.run_path(str(example), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert not code
    printed = capsys.readouterr().out
    for part in PRINTS[example.stem]:
        assert part in printed
