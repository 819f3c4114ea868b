"""Every line has one room: imports only flow downstream, and some words are only spoken in some rooms."""

import ast
import re
from pathlib import Path

import pytest

import maxds

PACKAGE = Path(maxds.__file__).parent
# Upstream first: a module may import those before it. A folder of this list is one room.
ORDER = """lines command section architecture config nodes loader mesh quantize host params tables schedule
    model model.ops model.residual model.engram model.sequences model.kernels model.indexer model.window model.attention
    model.compressed model.rounded model.moe model.layout model.deepseek model.cache model.decode
    checksum muon optimizer update step flops describe
    aot aot.executable aot.topology aot.hlo aot.cost aot.timeline aot.network aot.fit aot.picture aot.remedies
    aot.report
    data integrity checkpoint parts records goodput exporter wandb_run metrics report trained generate score
    watchdog shards local_checkpoint saves rollback loop train
    hf hf.files hf.quantized hf.table hf.v4 hf.settings convert
    compile cluster jobset launch trial doctor""".split()
# Less than the order would allow.
ONLY = {"flops": {"architecture"}, "quantize": set(), "schedule": {"host", "quantize", "params"}}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def room(module: str) -> str:
    """The entry of the order that a module belongs to."""
    return module if module in ORDER else module.split(".")[0]


def imported(path: Path) -> set[str]:
    """The modules of maxds that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "maxds":
            base = node.module.removeprefix("maxds").removeprefix(".")
            names = [".".join(filter(None, (base, alias.name))) for alias in node.names]
            found |= {name if name in MODULES else base for name in names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("maxds.") for a in node.names if a.name.startswith("maxds.")}
    return found - {""}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_is_upstream(module):
    place = room(module)
    assert place in ORDER, f"give {module} a place in the order"
    allowed = ONLY.get(place, set(ORDER[: ORDER.index(place)]))
    found = {room(other) for other in imported(MODULES[module])} - {place}
    assert found <= allowed, f"{module} imports {sorted(found - allowed)} from downstream"


# Word -> the rooms that may speak it.
WORDS = {
    r"PartitionSpec": {"mesh", "params", "tables", "step", "describe", "generate", "score"}
    | {"model.residual", "model.engram", "model.indexer", "model.attention", "model.compressed", "model.moe"}
    | {"model.layout", "model.deepseek", "model.decode"},
    r"shard_map\(": {"muon", "step", "integrity", "generate", "score", "shards"},
    r"optimization_barrier\(": {
        "params",
        "schedule",
        "model.moe",
        "model.ops",
        "muon",
    },  # what a loop exchanges stays in it
    r"(all_gather|psum_scatter|all_to_all|ppermute)\(": {"params", "tables", "model.sequences", "model.moe", "muon"},
    r"psum\(": {"params", "tables", "step", "shards"},
    r"custom_vjp": {
        "params",
        "tables",
        "schedule",
        "model.ops",
        "model.kernels",
        "model.indexer",
        "model.window",
        "model.rounded",
        "model.moe",
    },
    r"^(import|from) (time|logging|pathlib|os|io|threading)\b|\bopen\(|\bprint\(|absl": {
        *(
            "lines",
            "command",
            "nodes",
            "loader",
            "mesh",
            "data",
            "checkpoint",
            "records",
            "goodput",
            "exporter",
            "wandb_run",
            "metrics",
            "report",
        ),
        *(
            "trained",
            "generate",
            "score",
            "watchdog",
            "local_checkpoint",
            "saves",
            "loop",
            "train",
            "compile",
            "launch",
            "doctor",
        ),
        *("aot.executable", "aot.topology", "aot.picture", "parts", "hf.files", "hf.settings", "convert"),
    },
}


@pytest.mark.parametrize("word", WORDS)
def test_word_is_spoken_only_in_its_rooms(word):
    found = {room(module) for module, path in MODULES.items() if re.search(word, path.read_text(), re.MULTILINE)}
    assert found <= WORDS[word]
    assert found, f"nobody says {word}: drop it here"
