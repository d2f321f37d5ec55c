// Each refusal is the class that programs catch.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

import { client, connect } from "./common.mjs";

const messages = [{ role: "user", content: "hi" }];
const refused = (promise, kind, wanted) =>
  assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, `${error}`);
    for (const [name, value] of Object.entries(wanted)) assert.equal(error[name], value);
    return true;
  });

test("400 names the field", async () => {
  for (const [name, value] of [["temperature", 3], ["n", 0], ["top_p", 0], ["max_tokens", -1]])
    await refused(
      client.chat.completions.create({ model: "smol", messages, [name]: value }),
      OpenAI.BadRequestError,
      { status: 400, param: name, type: "invalid_request_error" },
    );
});

test("401 for a wrong key", () =>
  refused(connect({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError, {
    status: 401,
    code: "invalid_api_key",
  }));

test("404 for an unknown model", () =>
  refused(client.chat.completions.create({ model: "no-such", messages }), OpenAI.NotFoundError, {
    status: 404,
    code: "model_not_found",
  }));

test("413 for a body that is too large", () =>
  refused(
    client.completions.create({ model: "smol", prompt: "a".repeat(9 << 20) }),
    OpenAI.APIError,
    { status: 413, code: "request_too_large" },
  ));

test("an error in mid-stream is thrown", async () => {
  const stream = await client.completions.create({
    model: "smol",
    prompt: "a",
    stream: true,
    min_tokens: 1,
    allowed_token_ids: [2],
  });
  await assert.rejects(async () => {
    for await (const _ of stream);
  }, OpenAI.APIError);
});
