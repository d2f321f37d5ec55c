"""Known faults D: what is wrong is refused by name, in one shape, before anything runs."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from octavo.server.fields import UnknownFields

pytestmark = [pytest.mark.model, pytest.mark.slow]
C, X = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}

BAD: list[tuple[str, dict[str, Any], str]] = [
    # D01, D04
    (X, {"messages": {"role": "user"}}, "messages"),
    (X, {"messages": None}, "messages"),
    (X, {"messages": []}, "messages"),
    (C, {"prompt": ""}, "prompt"),
    (C, {"prompt": [""]}, "prompt"),
    (C, {"prompt": ["ok", ""]}, "prompt"),
    (C, {"prompt": []}, "prompt"),
    (C, {"prompt": [[]]}, "prompt"),
    (C, {"prompt": None}, "prompt"),
    # D02
    (C, {"prompt": [49152]}, "prompt"),
    (C, {"prompt": [[1, 2], [49999]]}, "prompt"),
    (C, {"prompt": [-1]}, "prompt"),
    (C, {"prompt": [2**70]}, "prompt"),
    (C, {"stop_token_ids": [49152]}, "stop_token_ids"),
    (C, {"allowed_token_ids": [49152]}, "allowed_token_ids"),
    (C, {"logit_bias": {"49152": 5}}, "logit_bias"),
    # others of this list
    (C, {"seed": 2**63}, "seed"),
    (C, {"top_k": -2}, "top_k"),
    (C, {"max_tokens": -1}, "max_tokens"),
    (C, {"max_tokens": 100000}, "max_tokens"),
    (C, {"stop": [""]}, "stop"),
    (C, {"temperature": 1e999}, ""),
    (X, {"top_logprobs": 2}, "top_logprobs"),
    (X, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    (X, {"guided_json": {}}, "guided_json"),
    (C, {"prompt": [905] * 9000}, "prompt"),
    (C, {"prompt": "test " * 9000}, "prompt"),
]


def check_error(answer: httpx.Response, status: int) -> Any:
    """The one shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(error["message"]) > 5
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], (str, int))
    return error


def test_d01_every_error_has_one_shape(exact: Any, single: Any) -> None:
    http = exact.http
    for raw in (b"{", b"", b"[]", b"nul", b'{"prompt":"\xff"}', b"[" * 100_000):
        check_error(http.post(C, content=raw, headers=JSON), 400)
    check_error(exact.send(X, messages={"role": "user"}), 400)
    assert check_error(http.post(X, json={}), 400)["param"] == "messages"
    check_error(http.get(X), 405)
    check_error(http.post("/v1/nowhere", json={}), 404)
    check_error(
        http.post(C, content=b'{"prompt":"a"}', headers={"Content-Type": "text/plain"}), 415
    )
    check_error(exact.send(C, prompt="a" * (9 << 20)), 413)
    assert check_error(exact.send(C, model="no-such"), 404)["code"] == "model_not_found"
    for key in (b"", b"Bearer wrong", b"Bearer \xff"):
        headers = {b"Authorization": key}
        answer = httpx.post(single.url + C, json={"prompt": "x"}, headers=headers, timeout=30)
        check_error(answer, 401)
    exact.canary()


def test_d01_a_server_that_fails_or_ends_says_so_in_the_same_shape(
    poisoned: Any, end_softly: Callable[[Any], None]
) -> None:
    assert check_error(poisoned.send(C, prompt=[1, 7]), 500)["type"] == "server_error"
    poisoned.wait_idle()
    stream = poisoned.connect(C, prompt=[1, 2], max_tokens=8000, ignore_eos=True)
    stream.read_until(b"data: ")
    end_softly(poisoned)
    with httpx.Client(base_url=poisoned.url) as client:
        while (answer := client.get("/ready")).status_code == 200:
            pass
        check_error(client.post(C, json={"prompt": [1]}), 503)
    assert "error" in answer.json()
    stream.close()


def test_d01_the_sdk_has_the_message(exact: Any) -> None:
    with openai.OpenAI(base_url=f"{exact.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="smol", prompt="")
        assert "prompt" in refused.value.message
        assert refused.value.param == "prompt"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="none", messages=[])
        assert missing.value.code == "model_not_found"


def test_d02_ids_outside_the_vocabulary_run_nothing(exact: Any) -> None:
    exact.wait_idle()
    before = exact.metric("vllm:prompt_tokens_total")
    for prompt, wrong in (([49152], 49152), ([[1, 2], [49999]], 49999), ([-1], -1)):
        for path_fields in ({"max_tokens": 1}, {"echo": True, "max_tokens": 0, "logprobs": 1}):
            error = check_error(exact.send(C, prompt=prompt, **path_fields), 400)
            assert str(wrong) in error["message"]
            assert "49151" in error["message"]
    assert exact.metric("vllm:prompt_tokens_total") == before
    for tokens in ([49152], [905, -1], [2**40]):
        refused = exact.http.post("/detokenize", json={"tokens": tokens})
        assert check_error(refused, 400)["param"] == "tokens"
    for legal in (0, 16, 49151):
        exact.ask(C, prompt=[legal], max_tokens=1)
    exact.canary()


def test_d04_empty_prompts_are_refused_whole(exact: Any) -> None:
    exact.wait_idle()
    before = exact.metric("vllm:prompt_tokens_total")
    empty_prompts: list[Any] = ["", [""], ["ok", ""], [], [[]], [[905], []]]
    for prompt in empty_prompts:
        assert check_error(exact.send(C, prompt=prompt), 400)["param"] == "prompt"
    check_error(exact.send(X, messages=[]), 400)
    assert exact.metric("vllm:prompt_tokens_total") == before
    empty = exact.ask(X, messages=[{"role": "user", "content": ""}], max_tokens=1)
    assert empty["usage"]["prompt_tokens"] > 0  # the template's own
    for text in (" ", "\n", "<|im_end|>", "\x00"):  # not empty
        assert exact.ask(C, prompt=text, max_tokens=1)["usage"]["prompt_tokens"] == 1
    exact.canary()


@pytest.mark.parametrize(("path", "fields", "param"), BAD)
def test_d07_a_stream_is_refused_as_the_whole_is(
    exact: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    body = exact.body(path, fields)
    errors = []
    for stream in (False, True):
        content = json.dumps({**body, "stream": stream}).encode()
        errors.append(check_error(exact.http.post(path, content=content, headers=JSON), 400))
    assert errors[0] == errors[1]
    assert (errors[0]["param"] or "").startswith(param)


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_d09_text_is_the_same_in_every_form(exact: Any) -> None:
    def ids(*messages: dict[str, Any]) -> list[int]:
        found: list[int] = exact.ask(f"{X}/render", messages=list(messages))["token_ids"]
        return found

    user = {"role": "user", "content": "ab"}
    for same in (parts("ab"), parts("a", "b"), parts("", "ab"), ["ab"]):
        assert ids({"role": "user", "content": same}) == ids(user)
    for role in ("system", "developer"):
        plain = ids({"role": role, "content": "Be brief."}, user)
        assert ids({"role": role, "content": parts("Be ", "brief.")}, user) == plain
    assert ids({"role": "developer", "content": "x"}, user) == ids(
        {"role": "system", "content": "x"}, user
    )
    call = {"role": "assistant", "content": None, "tool_calls": CALLS}
    result = {"role": "tool", "tool_call_id": "c", "content": "7"}
    assert ids(user, call, {**result, "content": parts("7")}) == ids(user, call, result)
    without = {"role": "assistant", "tool_calls": CALLS}
    assert ids(user, without, result) == ids(user, call, result) != ids(user, result)
    assert ids({**user, "name": "Ann"}) == ids(user)  # this template has no names
    empty = {"role": "assistant", "content": ""}
    assert ids(user, empty, user) == ids(user, {**empty, "content": []}, user)
    usages = [
        exact.ask(X, messages=[{"role": "user", "content": content}], max_tokens=1)["usage"]
        for content in ("ab", parts("a", "b"))
    ]
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
    exact.ask(X, messages=[user, call, result], max_tokens=1)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, "messages[1].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
            "messages[1].content[0]",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            "messages[1].content[0].text",
        ),
        ({"role": "user", "content": [None]}, "messages[1].content[0]"),
        ({"role": "wizard", "content": "a"}, "messages[1].role"),
        ({"role": "User", "content": "a"}, "messages[1].role"),
        ({"content": "a"}, "messages[1].role"),
        ({"role": "user", "content": "a", "name": 5}, "messages[1].name"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
    ],
)
def test_d09_what_is_no_text_is_refused(exact: Any, message: Any, param: str) -> None:
    refused = exact.send(X, messages=[*HI, message], max_tokens=1)
    assert check_error(refused, 400)["param"] == param


def test_d12_unknown_fields_are_accepted_and_lost_constraints_refused(exact: Any) -> None:
    plain = exact.ask(X, max_tokens=3)
    harmless = {
        "temperatur": 0, "foo": 1, "store": True, "metadata": {"a": "b"}, "user": "u",
        "service_tier": "auto", "parallel_tool_calls": True,
    }  # fmt: skip
    answer = exact.ask(X, max_tokens=3, **harmless)
    assert answer["choices"] == plain["choices"]
    for name, value in {
        "guided_json": {"type": "object"}, "guided_regex": "a+", "guided_choice": ["a"],
        "guided_grammar": "root", "chat_template": "x", "suffix": "x",
    }.items():  # fmt: skip
        for path in (C, X):
            error = check_error(exact.send(path, max_tokens=3, **{name: value}), 400)
            assert error["param"] == name
            assert name in error["message"]


def test_d12_each_unknown_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            fields.notice({"temperatur", "temperature", "store"}, {"temperature"})
        assert [record.getMessage().count("'temperatur'") for record in caplog.records] == [1]
        caplog.clear()
        for i in range(1000):  # a client cannot fill the log
            fields.notice({f"x{i}" + "y" * 10_000}, set())
    assert 0 < len(caplog.records) <= UnknownFields.MAX_NAMES
    assert all(len(record.getMessage()) < 300 for record in caplog.records)


def test_d13_names_of_the_model(exact: Any) -> None:
    listed = [model["id"] for model in exact.http.get("/v1/models").json()["data"]]
    assert listed == ["smol", "alias", "org/smol"]
    for name in (*listed, "", None):
        for path in (C, X):
            assert exact.ask(path, model=name, max_tokens=1)["model"] == "smol"
    assert exact.ask(C, max_tokens=1)["model"] == "smol"  # absent
    assert {c["model"] for c in exact.stream(X, model="alias", max_tokens=1)} == {"smol"}
    for name in ("no-such", "SMOL", "smol ", "org", "org/SMOL", "../smol"):
        for path in (C, X, f"{X}/render", "/tokenize", "/detokenize"):
            fields: dict[str, Any] = {"tokens": [1]} if path == "/detokenize" else {}
            error = check_error(exact.send(path, model=name, **fields), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert all(served in error["message"] for served in listed)
    for wrong in (5, ["smol"], {"id": "smol"}, True):
        assert check_error(exact.send(X, model=wrong), 400)["param"] == "model"
    for name in listed:
        assert exact.http.get(f"/v1/models/{name}").json()["id"] == name
    assert exact.http.get("/v1/models/org%2Fsmol").json()["id"] == "org/smol"
    error = check_error(exact.http.get("/v1/models/no-such"), 404)
    assert error["code"] == "model_not_found"


NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**30, "", "a", "🌶",
    "\x00", "a" * 3000, "49152", [], [0], [1, 2, 3], ["a"], ["", "a"], [[1], [2, 3]], [None], [[]],
    {}, {"a": 1}, {"7": 5}, {"role": "user"}, [{"role": "user", "content": "a"}], "/../x", "null",
]  # fmt: skip


def fuzzed_body(rng: random.Random, schema: dict[str, Any], fields: list[str]) -> Any:
    if rng.random() < 0.02:
        return rng.choice(NASTY)
    body: dict[str, Any] = {}
    properties = schema.get("properties", {})
    if "messages" in properties and rng.random() < 0.9:
        body["messages"] = [fuzzed_message(rng) for _ in range(rng.randint(1, 3))]
    if "prompt" in properties and rng.random() < 0.9:
        body["prompt"] = rng.choice(["hi", [1, 2, 3], "🌶", ["a", "b"], [[1], [2]]])
    for name in rng.sample(fields, rng.choice((0, 1, 1, 2, 3))):
        body[name] = plausible(rng, properties.get(name, {}))
    limit = {"max_tokens": rng.randint(1, 4)} if "max_tokens" in properties else {}
    return {**limit, **body} if rng.random() < 0.95 else body | limit


def fuzzed_message(rng: random.Random) -> Any:
    message = {"role": rng.choice(["user", "system", "assistant", "tool"]), "content": "hi"}
    if rng.random() < 0.7:
        return message
    wrong, kind = rng.choice(NASTY), rng.choice(["text", "image_url", "refusal", "x"])
    parts = [{"type": kind, kind: wrong}, rng.choice(NASTY)]
    calls = [{"id": wrong, "type": wrong, "function": {"name": wrong, "arguments": wrong}}, wrong]
    change: dict[str, Any] = {
        rng.choice(["role", "content", "name", "tool_calls", "tool_call_id"]): wrong,
        rng.choice(["content", "foo"]): parts[: rng.randint(1, 2)],
        rng.choice(["tool_calls", "foo"]): calls[: rng.randint(0, 2)],
    }
    keys = rng.sample(sorted(change), rng.randint(1, len(change)))
    return {**message, **{key: change[key] for key in keys}}


def plausible(rng: random.Random, schema: dict[str, Any]) -> Any:
    """A value of the schema's own kind, or any other."""
    kinds = [one.get("type") for one in schema.get("anyOf", [schema])]
    if rng.random() < 0.4:
        return rng.choice(NASTY)
    return {
        "integer": rng.randint(-2, 12),
        "number": rng.choice([0, 0.1, 0.9, 1, 1.5, 2]),
        "boolean": rng.random() < 0.5,
        "string": rng.choice(["a", "tiny", "left", " "]),
        "array": rng.choice([[], [1], [5, 200], ["a"], ["ab", "c"]]),
        "object": rng.choice([{}, {"5": 3}, {"include_usage": True}]),
    }.get(str(rng.choice(kinds)))


def test_d15_no_body_brings_a_server_error(tiny: Any) -> None:
    """2,000 bodies from the server's own description, every route; only described statuses come back."""
    document = tiny.http.get("/openapi.json").json()
    tiny.canary()
    jobs: list[tuple[str, str, Any, set[str]]] = []
    rng = random.Random(15)
    for path, methods in sorted(document["paths"].items()):
        for method, operation in sorted(methods.items()):
            url = path.replace("{model_id}", rng.choice(["tiny", "no-such", "%00"]))
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            options = schema.get("anyOf") if "properties" not in schema else None
            many = 330 if content and path in (C, X, f"{C}/render", f"{X}/render") else 60
            many = many + 280 if path in (C, X) else many
            for _ in range(many if content else 20):
                shape = rng.choice(options) if options else schema
                fields = [*sorted(shape.get("properties", {})), "foo", "tools", "suffix"]
                body = fuzzed_body(rng, shape, fields) if content else None
                jobs.append((method.upper(), url, body, set(operation["responses"])))
    assert len(jobs) >= 2000
    rng.shuffle(jobs)
    failures: list[str] = []

    def work(mine: list[tuple[str, str, Any, set[str]]]) -> None:
        with httpx.Client(base_url=tiny.url, timeout=120) as client:
            for method, url, body, statuses in mine:
                kwargs: dict[str, Any] = {} if body is None else {"json": body}
                answer = client.request(method, url, **kwargs)
                status = answer.status_code
                if status >= 500 or (str(status) not in statuses and status != 404):
                    failures.append(f"{method} {url} {body!r:.300} {status} {answer.text[:200]}")
                elif status >= 400 and len(answer.json()["error"]["message"]) < 5:
                    failures.append(f"{method} {url} {body!r:.300} has no message")

    threads = [threading.Thread(target=work, args=(jobs[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures[:10])
    tiny.audit()
    tiny.canary()


def test_d17_model_objects_and_paths(exact: Any) -> None:
    listing = exact.http.get("/v1/models").json()
    assert listing["object"] == "list"
    for model in (*listing["data"], exact.http.get("/v1/models/smol").json()):
        assert model["object"] == "model"
        assert isinstance(model["id"], str)
        assert isinstance(model["owned_by"], str)
        assert isinstance(model["created"], int)
        assert model["created"] > 1_600_000_000
    body = {"messages": HI, "max_tokens": 1}
    for path in (
        "/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/",
        "//v1/chat/completions", "/v1//chat/completions", "/V1/chat/completions", "/v1/chat",
        "/completions", "/models",
    ):  # fmt: skip
        answer = exact.http.post(path, json=body, follow_redirects=False)
        check_error(answer, 404)
    for path in ("/v1/models/", "/v1", "/models", "/v1/models/smol/"):
        check_error(exact.http.get(path, follow_redirects=False), 404)
    check_error(raw_get(exact.url, "//v1/models"), 404)
    check_error(exact.http.options(X), 405)
    assert exact.http.head(X).status_code == 405
    text = exact.http.post(X, content=json.dumps(body), headers={"Content-Type": "text/plain"})
    check_error(text, 415)


def raw_get(url: str, path: str) -> httpx.Response:
    """A request whose path no client has tidied up."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    status, _, rest = data.partition(b"\r\n")
    headers, _, content = rest.partition(b"\r\n\r\n")
    pairs = [line.split(b": ", 1) for line in headers.split(b"\r\n")]
    return httpx.Response(
        int(status.split()[1]), headers=[(k, v) for k, v in pairs], content=content
    )


@pytest.mark.parametrize("slash", ["", "/"])
def test_d17_the_sdk_takes_either_base_url(exact: Any, slash: str) -> None:
    base = f"{exact.url}/v1{slash}"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["smol", "alias", "org/smol"]
        assert client.models.retrieve("org/smol").id == "org/smol"
        answer = client.completions.create(model="smol", prompt="Hello world", max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
