"""LangChain, LiteLLM and the ``llm`` command: a chat and a stream each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it asks the internet

QUESTION = "What is the capital of France? Answer in one word."


@pytest.fixture(scope="module")
def answer(client: Any) -> Any:
    """What the official SDK gets."""
    answer = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_completion_tokens=10,
    )
    assert "Paris" in answer.choices[0].message.content
    return answer


@pytest.fixture(scope="module")
def expected(answer: Any) -> str:
    """Its text."""
    content: str = answer.choices[0].message.content
    return content


@pytest.fixture(scope="module")
def num_tokens(answer: Any) -> int:
    """Its length."""
    count: int = answer.usage.completion_tokens
    return count


def test_langchain(base_url: str, api_key: str, expected: str, num_tokens: int) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="smol",
        base_url=base_url,
        api_key=api_key,
        temperature=0,
        max_completion_tokens=10,
        max_retries=0,
        stream_usage=True,
    )
    said = model.invoke(QUESTION)
    assert said.content == expected
    assert said.usage_metadata["output_tokens"] == num_tokens
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == expected
    told = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in told] == [num_tokens]
    assert [one.content for one in model.batch([QUESTION] * 3)] == [expected] * 3


def test_litellm(base_url: str, api_key: str, expected: str, num_tokens: int) -> None:
    import litellm

    fields: Any = {
        "model": "openai/smol",
        "messages": [{"role": "user", "content": QUESTION}],
        "api_base": base_url,
        "api_key": api_key,
        "temperature": 0,
        "max_tokens": 10,
        "num_retries": 0,
    }
    said = litellm.completion(**fields)
    assert said.choices[0].message.content == expected
    assert said.usage.completion_tokens == num_tokens
    stream = litellm.completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**fields, "temperature": 5})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**fields, "model": "openai/no-such"})


@pytest.mark.parametrize("way", ["--no-stream", "streamed"])
def test_llm(base_url: str, api_key: str, expected: str, tmp_path: Path, way: str) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: smol\n  api_base: {base_url}\n  api_key_name: octavo\n"
    )
    command = [sys.executable, "-m", "llm", "-m", "here", QUESTION, "--key", api_key]
    command += ["-o", "temperature", "0", "-o", "max_tokens", "10"]
    said = subprocess.run(
        [*command, *([way] if way.startswith("--") else [])],
        env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == expected.strip()
