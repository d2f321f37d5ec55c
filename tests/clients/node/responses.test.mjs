// The Responses API, where the server has it.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

import { client, collect, lacks } from "./common.mjs";

const skip = lacks("/v1/responses");
const greedy = {
  model: "smol",
  input: "What is the capital of France? Answer in one word.",
  temperature: 0,
  max_output_tokens: 16,
};

test("whole", { skip }, async () => {
  const answer = await client.responses.create(greedy);
  assert.match(answer.output_text, /Paris/);
  assert.equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens);
});

test("streamed", { skip }, async () => {
  const whole = await client.responses.create(greedy);
  const events = await collect(await client.responses.create({ ...greedy, stream: true }));
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, `response.${whole.status}`);
  assert.deepEqual(
    events.map((event) => event.sequence_number),
    events.map((_, index) => index),
  );
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
});

test("kept, continued and deleted", { skip }, async () => {
  const first = await client.responses.create(greedy);
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
  const second = await client.responses.create({
    ...greedy,
    input: "And of Italy?",
    previous_response_id: first.id,
  });
  assert.ok(second.usage.input_tokens > first.usage.input_tokens);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});
