import dataclasses
import json
from typing import Literal

import pytest
import yaml

from maxds import loader, nodes
from maxds.section import section


@section
class Rope:
    factor: float
    base: float = 1e4


@section
class Model:
    width: int
    heads: int = 4
    rope: Rope | None = None

    def __post_init__(self):
        mistakes = []
        if self.width <= 0:
            mistakes.append(f"width={self.width} must be positive")
        if self.width % self.heads:
            mistakes.append(f"width={self.width} is not divisible by heads={self.heads}")
        if mistakes:
            raise ValueError("\n".join(mistakes))


@section
class Source:
    path: tuple[str, ...] = ()
    weight: float = 1.0

    def __post_init__(self):
        if self.weight <= 0:
            raise ValueError(f"weight={self.weight} must be positive")


@section
class Data:
    sources: tuple[Source, ...] = (Source(path=("a", "b")), Source())
    shuffle: bool = True


@section
class Optimizer:
    kind: Literal["adamw", "muon"] = "adamw"
    order: Literal["first"] = "first"
    lr: float
    clip: float | None = 1.0
    warmup: int | None = None
    keep: tuple[Literal["mean", "square"], ...] = ()


@section
class Config:
    name: str = "run"
    note: str | None = None
    steps: int
    model: Model
    data: Data
    optimizer: Optimizer

    def __post_init__(self):
        if self.optimizer.warmup is not None and self.optimizer.warmup > self.steps:
            raise ValueError(f"optimizer.warmup={self.optimizer.warmup} exceeds steps={self.steps}")
        if self.name == "forbidden":
            raise ValueError("this name is taken")


GOOD = """\
steps: 100
model:
  width: 64
optimizer:
  lr: 1e-3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder; the repository's configs are those in its `shipped`."""
    (tmp_path / "shipped").mkdir()
    monkeypatch.setattr(nodes, "CONFIGS", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(folder):
    """Loads a text as `run.yaml`."""

    def load_text(text, *overrides):
        (folder / "run.yaml").write_text(text, encoding="utf-8")
        return loader.load(Config, "run.yaml", overrides)[0]

    return load_text


@pytest.fixture
def mistakes(load):
    def mistakes_in(text, *overrides):
        with pytest.raises(loader.ConfigError) as caught:
            load(text, *overrides)
        assert str(caught.value) == "\n".join(caught.value.mistakes)
        return list(caught.value.mistakes)

    return mistakes_in


# ---------------------------------------------------------------------------------------------------- values and types


def test_keys_left_out_have_their_defaults(load):
    assert load(GOOD) == Config(steps=100, model=Model(width=64), data=Data(), optimizer=Optimizer(lr=1e-3))


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1", 1.0), ("-0.5", -0.5), ("1_000.5", 1000.5), (".5", 0.5), ("1E3", 1000.0)],
)
def test_a_float_may_be_written_as(load, text, value):
    assert load(GOOD, f"optimizer.lr={text}").optimizer.lr == value


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("1_000", 1000), ("1e6", 10**6), ("1.5e3", 1500), ("010", 10)])
def test_an_int_may_be_written_as(load, text, value):
    steps = load(GOOD, f"steps={text}").steps
    assert (type(steps), steps) == (int, value)


@pytest.mark.parametrize("text", ["100", "2024-01-01", "yes", "1:30", "3e-4", "gs://bucket/run", "'null'"])
def test_a_text_is_what_is_written_whatever_yaml_would_make_of_it(load, text):
    assert load(GOOD, f"name={text}").name == text.strip("'")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False)])
def test_a_bool_may_be_written_as(load, text, value):
    assert load(GOOD, f"data.shuffle={text}").data.shuffle is value


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_null_is_allowed_where_the_type_says_so(load, text):
    assert load(GOOD, f"optimizer.clip={text}").optimizer.clip is None


def test_a_list_becomes_a_tuple_and_a_single_scalar_a_tuple_of_one(load):
    assert load(GOOD, "optimizer.keep=[mean, square]").optimizer.keep == ("mean", "square")
    assert load(GOOD, "optimizer.keep=mean").optimizer.keep == ("mean",)


def test_a_list_of_sections_becomes_a_tuple_of_sections(load):
    text = GOOD + "data:\n  sources:\n    - path: a b\n    - path: [c, d]\n      weight: 2\n"
    assert load(text).data.sources == (Source(path=("a b",)), Source(path=("c", "d"), weight=2.0))


def test_an_optional_section_may_be_written_left_out_or_null(load):
    assert load(GOOD + "data: {}\n").model.rope is None
    assert load(GOOD, "model.rope={factor: 40}").model.rope == Rope(factor=40.0)
    assert load(GOOD, "model.rope=null").model.rope is None


def test_keys_and_values_may_be_pasted_from_json(load):
    text = json.dumps({"steps": 5, "model": {"width": 8, "rope": {"factor": 2}}, "optimizer": {"lr": 0.1}}, indent=2)
    assert load(text).model == Model(width=8, rope=Rope(factor=2.0))


# --------------------------------------------------------------------------------------------------------------- bases


def test_sections_merge_with_the_base_key_by_key_and_lists_are_replaced(folder, load):
    (folder / "parent.yaml").write_text(GOOD + "data:\n  shuffle: false\n  sources: [{path: a}, {path: b}]\n")
    config = load("base: parent\nmodel:\n  heads: 2\ndata:\n  sources: [{path: c}]\n")
    assert config.model == Model(width=64, heads=2)
    assert config.data == Data(shuffle=False, sources=(Source(path=("c",)),))


def test_a_base_may_have_a_base(folder, load):
    (folder / "grandparent.yaml").write_text(GOOD)
    (folder / "parent.yaml").write_text("base: grandparent\nsteps: 7\nname: parent\n")
    config = load("base: parent\nname: child\n")
    assert (config.name, config.steps, config.model.width) == ("child", 7, 64)


def test_a_base_is_looked_up_beside_the_file_and_then_among_the_shipped_configs(folder, load):
    (folder / "shipped" / "both.yaml").write_text(GOOD + "name: shipped\n")
    (folder / "shipped" / "one.yaml").write_text(GOOD + "name: shipped\n")
    (folder / "both.yaml").write_text(GOOD + "name: beside\n")
    assert load("base: both\n").name == "beside"
    assert load("base: one\n").name == "shipped"


def test_a_base_may_be_named_with_its_suffix_or_by_a_path(folder, load):
    (folder / "shipped" / "parent.yaml").write_text(GOOD)
    assert load("base: parent.yaml\n").steps == 100
    assert load("base: shipped/parent\n").steps == 100


def test_a_base_cycle_is_named(folder, mistakes):
    (folder / "a.yaml").write_text("base: b\n")
    (folder / "b.yaml").write_text("\nbase: run\n")
    assert mistakes("base: a\n") == ["b.yaml:2: base cycle: run -> a -> b -> run"]


def test_a_base_that_is_not_found_is_named_with_the_nearest_one_that_is(folder, mistakes):
    (folder / "shipped" / "deepseek3-671b.yaml").write_text(GOOD)
    assert mistakes("steps: 1\nbase: deepseek3-617b\n") == [
        "run.yaml:2: there is no base deepseek3-617b.yaml beside run.yaml or in configs/; did you mean deepseek3-671b?"
    ]


def test_a_base_that_is_not_a_name_is_a_mistake(mistakes):
    assert mistakes("base: [a, b]\n") == ["run.yaml:1: base must be the name of a config, not a list"]
    assert mistakes("base:\n") == ["run.yaml:1: base must be the name of a config, not null"]


# ----------------------------------------------------------------------------------------------------------- overrides


def test_of_overrides_of_the_same_key_the_last_wins(load):
    assert load(GOOD, "steps=1", "steps=2").steps == 2


def test_an_override_reaches_into_a_section_that_the_file_does_not_have(load):
    assert load(GOOD, "data.shuffle=false").data.shuffle is False
    assert load(GOOD, "model.rope.factor=2").model.rope == Rope(factor=2.0)


def test_an_override_may_set_a_whole_section_and_a_later_one_a_key_of_it(load):
    assert load(GOOD, "model.rope={factor: 2, base: 5}", "model.rope.base=6").model.rope == Rope(factor=2, base=6)
    assert load(GOOD, "model.rope={factor: 2}", "model.rope=null", "model.rope.factor=3").model.rope == Rope(factor=3)


def test_an_override_may_set_a_list_of_sections(load):
    assert load(GOOD, "data.sources=[{path: x}]").data.sources == (Source(path=("x",)),)


def test_the_value_of_an_override_may_hold_an_equals_sign(load):
    assert load(GOOD, "name=a=b").name == "a=b"


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=ten", "steps must be an integer, not ten"),
        ("steps='10'", "steps must be an integer, not '10'"),
        ('steps="10"', "steps must be an integer, not '10'"),
        ("steps=1.5", "steps must be an integer, not 1.5"),
        ("steps=1e23", "steps must be an integer, not 1e23"),
        ("steps=true", "steps must be an integer, not true"),
        ("steps=", "steps must be an integer, not null"),
        ("steps=[1]", "steps must be an integer, not a list"),
        ("steps={a: 1}", "steps must be an integer, not a section"),
        ("optimizer.lr=ten", "optimizer.lr must be a number, not ten"),
        ("optimizer.lr=nan", "optimizer.lr must be a number, not nan"),
        ("optimizer.lr=false", "optimizer.lr must be a number, not false"),
        ("optimizer.lr=null", "optimizer.lr must be a number, not null"),
        ("optimizer.clip=off", "optimizer.clip must be a number or null, not off"),
        ("optimizer.warmup=few", "optimizer.warmup must be an integer or null, not few"),
        ("data.shuffle=1", "data.shuffle must be true or false, not 1"),
        ("name=null", "name must be text, not null"),
        ("note=[a]", "note must be text or null, not a list"),
        ("model=5", "model must be a section, not 5"),
        ("model.rope=[40]", "model.rope must be a section or null, not a list"),
        ("optimizer.kind=adam", "optimizer.kind must be one of adamw, muon, not adam; did you mean adamw?"),
        ("optimizer.kind=sgd", "optimizer.kind must be one of adamw, muon, not sgd"),
        ("optimizer.order=last", "optimizer.order must be first, not last"),
        ("optimizer.keep=none", "optimizer.keep must be one of mean, square, not none"),
        ("optimizer.keep=[mean, men]", "optimizer.keep[1] must be one of mean, square, not men; did you mean mean?"),
        ("optimizer.keep=null", "optimizer.keep must be a list, not null"),
        ("data.sources=a", "data.sources must be a list, not a"),
        ("data.sources={path: a}", "data.sources must be a list, not a section"),
        ("data.sources=[a]", "data.sources[0] must be a section, not a"),
        ("data.sources=[{path: [a, null]}]", "data.sources[0].path[1] must be text, not null"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named_with_the_type_it_should_have(mistakes, override, message):
    assert mistakes(GOOD, override) == [f"override {override}: {message}"]


def test_a_mistake_in_a_file_points_at_the_line_of_its_key(mistakes):
    text = "# comment\nsteps:\n  ten\nmodel:\n  width: 64\n  rope:\n    factor: big\noptimizer: {lr: 1}\n"
    assert mistakes(text) == [
        "run.yaml:2: steps must be an integer, not ten",
        "run.yaml:7: model.rope.factor must be a number, not big",
    ]


def test_a_mistake_in_a_base_points_at_the_base(folder, mistakes):
    (folder / "parent.yaml").write_text(GOOD + "name: [x]\n")
    assert mistakes("base: parent\n") == ["parent.yaml:6: name must be text, not a list"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.widht=1", "unknown key model.widht; did you mean model.width?"),
        ("optimzer.kind=muon", "unknown key optimzer; did you mean optimizer?"),
        ("lr=1", "unknown key lr; did you mean optimizer.lr?"),
        ("model.steps=1", "unknown key model.steps; did you mean steps?"),
        ("model.xyz=1", "unknown key model.xyz"),
        ("data.sources=[{weigth: 1}]", "unknown key data.sources[0].weigth; did you mean data.sources[0].weight?"),
    ],
)
def test_an_unknown_key_is_named_with_what_may_have_been_meant(mistakes, override, message):
    assert mistakes(GOOD, override) == [f"override {override}: {message}"]


def test_a_missing_key_is_named_in_full_at_the_section_that_lacks_it(mistakes):
    assert mistakes("model:\n  heads: 2\n") == [
        "run.yaml:1: missing model.width",
        "run.yaml: missing optimizer.lr",
        "run.yaml: missing steps",
    ]


def test_a_section_written_in_several_places_is_that_of_the_file_nearest_the_user(folder, mistakes):
    (folder / "parent.yaml").write_text("steps: 1\nmodel: {width: 4}\noptimizer:\n  clip: 1\n")
    assert mistakes("base: parent\noptimizer:\n  clip: 2\n") == ["run.yaml:2: missing optimizer.lr"]
    assert mistakes("base: parent\n", "optimizer.clip=2") == ["parent.yaml:3: missing optimizer.lr"]


def test_a_section_that_lacks_many_keys_says_so_in_one_line(folder):
    six = dataclasses.make_dataclass("Six", [(name, int) for name in "abcdef"], frozen=True, kw_only=True)
    cls = dataclasses.make_dataclass("Outer", [("model", six)], frozen=True, kw_only=True)
    (folder / "run.yaml").write_text("{}\n")
    with pytest.raises(loader.ConfigError) as caught:
        loader.load(cls, "run.yaml")
    assert caught.value.mistakes == ("run.yaml: model lacks 6 keys: a, b, c, d, e, f",)


def test_a_duplicate_key_is_a_mistake(mistakes):
    text = GOOD + "data:\n  shuffle: true\n  shuffle: true\n"
    assert mistakes(text) == ["run.yaml:8: duplicate key shuffle, set before at run.yaml:7"]


def test_a_key_that_is_not_a_word_is_a_mistake(mistakes):
    assert mistakes(GOOD + "name: {{user}}\n") == [
        "run.yaml:6: a key must be a word; quote a text that begins with { or [",
        "run.yaml:6: name must be text, not a section",
    ]


def test_a_failed_check_points_at_the_key_it_names_and_each_line_is_a_mistake(mistakes):
    text = "steps: 100\nmodel:\n  heads: 3\n  width: -5\noptimizer: {lr: 1}\n"
    assert mistakes(text) == [
        "run.yaml:4: model: width=-5 must be positive",
        "run.yaml:4: model: width=-5 is not divisible by heads=3",
    ]


def test_a_failed_check_points_at_the_value_nearest_the_user(folder, mistakes):
    (folder / "parent.yaml").write_text(GOOD)
    assert mistakes("base: parent\nmodel:\n  heads: 3\n") == ["run.yaml:3: model: width=64 is not divisible by heads=3"]
    assert mistakes("base: parent\nmodel:\n  heads: 3\n", "model.width=5") == [
        "override model.width=5: model: width=5 is not divisible by heads=3"
    ]


def test_a_failed_check_between_sections_points_at_a_dotted_key(mistakes):
    assert mistakes(GOOD + "  warmup: 500\n") == ["run.yaml:6: optimizer.warmup=500 exceeds steps=100"]


def test_a_failed_check_that_names_no_key_points_at_its_section(mistakes):
    assert mistakes(GOOD + "name: forbidden\n") == ["run.yaml: this name is taken"]


def test_a_failed_check_in_a_list_names_the_item(mistakes):
    text = GOOD + "data:\n  sources:\n    - path: a\n    - path: b\n      weight: 0\n"
    assert mistakes(text) == ["run.yaml:10: data.sources[1]: weight=0.0 must be positive"]


def test_every_mistake_is_reported_at_once(mistakes):
    text = "steps: ten\nnmae: x\nmodel: {width: 7}\ndata:\n  shuffle: 2\n  shuffle: 3\noptimizer: {clip: 0}\n"
    assert mistakes(text, "novalue", "optimizer.kind=adam", "a=[") == [
        "run.yaml:6: duplicate key shuffle, set before at run.yaml:5",
        "override novalue: expected key=value, such as optimizer.lr=3e-4",
        "override a=[: not valid YAML: expected the node content, but found '<stream end>'",
        "run.yaml:2: unknown key nmae; did you mean name?",
        "run.yaml:1: steps must be an integer, not ten",
        "run.yaml:3: model: width=7 is not divisible by heads=4",
        "run.yaml:5: data.shuffle must be true or false, not 2",
        "override optimizer.kind=adam: optimizer.kind must be one of adamw, muon, not adam; did you mean adamw?",
        "run.yaml:7: missing optimizer.lr",
    ]


@pytest.mark.parametrize("override", ["steps", "=5", "model.=5", "a..b=1"])
def test_an_override_without_key_or_value_is_a_mistake(mistakes, override):
    assert mistakes(GOOD, override) == [f"override {override}: expected key=value, such as optimizer.lr=3e-4"]


# ------------------------------------------------------------------------------------------------- files that are none


def test_a_file_that_is_absent_is_named(folder):
    with pytest.raises(loader.ConfigError) as caught:
        loader.load(Config, "absent.yaml")
    assert str(caught.value) == "absent.yaml: cannot be read: No such file or directory"


def test_a_file_that_is_not_text_is_named(folder):
    (folder / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(loader.ConfigError) as caught:
        loader.load(Config, "run.yaml")
    assert str(caught.value) == (
        "run.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\n  name: x\n", "run.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("steps: [1,\n", "run.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("steps: 1\n\tname: x\n", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("steps: \x07\n", "run.yaml: not valid YAML: special characters are not allowed"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML: but found another document"),
        ("# nothing\n", "run.yaml: a config is made of `key: value` lines, but this file holds nothing"),
        ("- a\n- b\n", "run.yaml: a config is made of `key: value` lines, but this file holds a list"),
        ("hello\n", "run.yaml: a config is made of `key: value` lines, but this file holds hello"),
    ],
)
def test_a_file_that_is_not_a_config_is_one_clear_line(mistakes, text, message):
    assert mistakes(text) == [message]


# --------------------------------------------------------------------------------------------------- render, and diffs

RENDERED = """\
name: run                                                 # default
note: null                                                # default
steps: 5                                                  # override
model:
  width: 64                                               # parent.yaml:3
  heads: 2                                                # run.yaml:3
  rope:
    factor: 2.0                                           # override
    base: 10000.0                                         # default
data:
  sources:
    - path: [c, d]                                        # run.yaml:6
      weight: 1.0                                         # default
    - path: []                                            # default
      weight: 2.0                                         # run.yaml:7
  shuffle: true                                           # default
optimizer:
  kind: adamw                                             # default
  order: first                                            # default
  lr: 0.001                                               # parent.yaml:5
  clip: 1.0                                               # default
  warmup: null                                            # default
  keep: []                                                # default
"""


def test_a_rendered_config_says_where_each_value_comes_from(folder):
    (folder / "parent.yaml").write_text(GOOD)
    (folder / "run.yaml").write_text(
        "base: parent\nmodel:\n  heads: 2\ndata:\n  sources:\n    - path: [c, d]\n    - weight: 2\n"
    )
    config, tree = loader.load(Config, "run.yaml", ["steps=5", "model.rope={factor: 2}"])
    assert loader.render(config, tree) == RENDERED


@pytest.mark.parametrize(
    "name",
    [
        "",
        " def ",
        "null",
        "5",
        "a: b",
        "a # b",
        "two\nlines\n",
        "é—漢 😀",
        "\x07",
        "'\"",
        "[x",
        "a" * 200 + " b",
        "- a",
    ],
)
def test_a_rendered_config_loads_to_an_equal_one(load, name):
    config = load(GOOD)
    config = dataclasses.replace(
        config, name=name, note=name, data=Data(sources=(Source(path=(name, "b, c"), weight=1e-20), Source()))
    )
    rendered = loader.render(config, nodes.Node({}, "", 0))
    assert load(rendered) == config
    assert [line for line in rendered.splitlines() if not line.endswith((":", "# default"))] == []


def test_a_rendered_config_is_yaml_for_other_readers_too(load):
    config = load(GOOD)
    rendered = loader.render(config, nodes.Node({}, "", 0))
    assert yaml.safe_load(rendered) == loader.plain(config)


def test_a_plain_config_survives_json(load):
    plain = loader.plain(load(GOOD))
    assert json.loads(json.dumps(plain)) == plain


def test_equal_configs_have_no_difference(load):
    assert loader.diff(loader.plain(load(GOOD)), loader.plain(load(GOOD))) == []


def test_a_difference_is_named_in_full_with_both_values(load):
    old = load(GOOD, "optimizer.keep=mean")
    new = load(
        GOOD, "optimizer.lr=2e-3", "name=a b", "optimizer.clip=null", "model.rope={factor: 2}", "optimizer.keep=[]"
    )
    assert loader.diff(loader.plain(old), loader.plain(new)) == [
        "name: run -> a b",
        "model.rope: null -> {factor: 2.0, base: 10000.0}",
        "optimizer.lr: 0.001 -> 0.002",
        "optimizer.clip: 1.0 -> null",
        "optimizer.keep: [mean] -> []",
    ]


def test_a_difference_in_a_list_of_sections_names_the_item(load):
    old, new = load(GOOD), load(GOOD, "data.sources=[{path: [a, b]}, {weight: 3}]")
    assert loader.diff(loader.plain(old), loader.plain(new)) == ["data.sources[1].weight: 1.0 -> 3.0"]


def test_keys_of_another_version_are_absent_on_one_side():
    assert loader.diff({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}) == [
        "a: 1 -> (absent)",
        "b.c: 2 -> (absent)",
        "b.d: (absent) -> 3",
    ]
