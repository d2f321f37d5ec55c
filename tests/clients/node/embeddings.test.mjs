// Embeddings, where the server has them.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

import { client, lacks } from "./common.mjs";

const skip = lacks("/v1/embeddings");
const model = "smol";

test("vectors of length 1", { skip }, async () => {
  const { data, usage } = await client.embeddings.create({ model, input: ["a cat", "a dog"] });
  assert.deepEqual(data.map(({ index }) => index), [0, 1]);
  for (const { embedding } of data) {
    const square = embedding.reduce((sum, value) => sum + value * value, 0);
    assert.ok(Math.abs(square - 1) < 1e-4);
  }
  assert.equal(usage.total_tokens, usage.prompt_tokens);
});

test("fewer dimensions", { skip }, async () => {
  const { data } = await client.embeddings.create({ model, input: "a cat", dimensions: 32 });
  assert.equal(data[0].embedding.length, 32);
});

test("a refusal", { skip }, async () => {
  await assert.rejects(
    client.embeddings.create({ model, input: "a cat", dimensions: 0 }),
    OpenAI.BadRequestError,
  );
});
