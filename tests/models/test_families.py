"""What every family declares: found by its file, refused by name, tested, readable without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from octavo.engine.checkpoint.families import architectures, families, family_of
from octavo.engine.checkpoint.fields import Fields
from octavo.engine.errors import CheckpointError
from octavo.engine.models import families as place
from octavo.engine.models.family import Family

HERE = Path(__file__).resolve().parent
NAMED = [pytest.param(family, id=type(family).__name__) for family in families()]


def module_of(family: Family) -> str:
    return type(family).__module__.rpartition(".")[2]


def test_every_file_is_found() -> None:
    files = {path.stem for path in Path(place.__path__[0]).glob("*.py")} - {"__init__"}
    assert {module_of(family) for family in families()} == files


def test_no_architecture_is_claimed_twice() -> None:
    counts = Counter(architectures())
    assert max(counts.values()) == 1
    assert all(name in family_of(name).architectures for name in counts)


def test_a_gguf_architecture_is_one_familys_where_experts_decide_nothing() -> None:
    plain = Fields({}, "model.gguf")
    names = Counter(f.gguf_architecture for f in families() if f.accepts_gguf(plain))
    assert {name: count for name, count in names.items() if name and count > 1} == {}


def test_a_refusal_names_what_octavo_runs() -> None:
    with pytest.raises(CheckpointError) as error:
        family_of("GPT2LMHeadModel")
    assert all(name in str(error.value) for name in architectures())


@pytest.mark.parametrize("name", architectures())
def test_absent_keys_take_the_values_of_transformers(
    name: str, assert_read_alike: Callable[..., None]
) -> None:
    assert_read_alike(getattr(transformers, name))


@pytest.mark.parametrize("family", NAMED)
def test_every_family_says_what_it_is_and_has_its_tests(family: Family) -> None:
    tests = (HERE / f"test_{module_of(family)}.py").read_text()
    assert family.models
    assert family.__doc__
    assert all(name in tests for name in family.architectures)
    assert "def test_logits" in tests
    assert "def test_greedy" in tests
    assert ("gguf" in tests) >= (family.gguf_architecture is not None)
