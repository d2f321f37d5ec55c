// Chat completions, whole and streamed.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

import { client, collect, connect } from "./common.mjs";

const messages = [
  { role: "system", content: "Answer in one word." },
  { role: "user", content: "What is the capital of France? Answer in one word." },
];
const greedy = { model: "smol", messages, temperature: 0, max_completion_tokens: 8 };
const whole = await client.chat.completions.create(greedy);
const expected = whole.choices[0].message.content;

test("whole", () => {
  assert.equal(whole.object, "chat.completion");
  assert.equal(whole.choices[0].message.role, "assistant");
  assert.ok(expected.length > 0);
  const { prompt_tokens, completion_tokens, total_tokens } = whole.usage;
  assert.equal(total_tokens, prompt_tokens + completion_tokens);
});

test("streamed, with usage", async () => {
  const stream_options = { include_usage: true };
  const chunks = await collect(
    await client.chat.completions.create({ ...greedy, stream: true, stream_options }),
  );
  const last = chunks.pop();
  assert.deepEqual(chunks[0].choices[0].delta, { role: "assistant", content: "" });
  assert.deepEqual(chunks.at(-1).choices[0].delta, {});
  assert.equal(chunks.at(-1).choices[0].finish_reason, whole.choices[0].finish_reason);
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), expected);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
});

test("the streaming helper", async () => {
  const runner = client.chat.completions.stream(greedy);
  let said = "";
  runner.on("content", (delta) => (said += delta));
  assert.equal(await runner.finalContent(), expected);
  assert.equal(said, expected);
});

test("several choices", async () => {
  const drawn = { ...greedy, temperature: 1, seed: 3, n: 2 };
  const { choices } = await client.chat.completions.create(drawn);
  const texts = ["", ""];
  for await (const chunk of await client.chat.completions.create({ ...drawn, stream: true }))
    for (const { index, delta } of chunk.choices) texts[index] += delta.content ?? "";
  assert.deepEqual(texts, choices.map((choice) => choice.message.content));
});

test("log-probabilities", async () => {
  const { choices } = await client.chat.completions.create({
    ...greedy,
    logprobs: true,
    top_logprobs: 2,
  });
  for (const token of choices[0].logprobs.content) {
    assert.equal(token.top_logprobs.length, 2);
    assert.equal(token.top_logprobs[0].token, token.token);
  }
});

test("request ids", async () => {
  const { data, response, request_id } = await client.chat.completions
    .create(greedy, { headers: { "X-Request-Id": "from-node" } })
    .withResponse();
  assert.equal(request_id, "from-node");
  assert.equal(data.id, "chatcmpl-from-node");
  assert.match(response.headers.get("openai-processing-ms"), /^\d+$/);
});

test("a stream that is left ends", async () => {
  const stream = await client.chat.completions.create({
    ...greedy,
    max_completion_tokens: 900,
    ignore_eos: true,
    stream: true,
  });
  let number = 0;
  for await (const _ of stream) if (++number === 3) break;
  assert.equal(stream.controller.signal.aborted, true);
  const running = async () => {
    const text = await (await fetch(new URL("/metrics", process.env.BASE_URL))).text();
    return Number(/^vllm:num_requests_running\{.*\} (.*)$/m.exec(text)[1]);
  };
  while ((await running()) > 0) await new Promise((resolve) => setTimeout(resolve, 50));
});

test("a timeout is told", async () => {
  const slow = { ...greedy, max_completion_tokens: 900, ignore_eos: true };
  await assert.rejects(
    connect({ timeout: 500 }).chat.completions.create(slow),
    OpenAI.APIConnectionTimeoutError,
  );
});
