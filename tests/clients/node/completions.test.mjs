// Models, completions and tokens.
import assert from "node:assert/strict";
import { test } from "node:test";

import { client, collect } from "./common.mjs";

const prompt = "The capital of France is";
const greedy = { model: "smol", prompt, temperature: 0, max_tokens: 8 };
const expected = (await client.completions.create(greedy)).choices[0].text;

test("models", async () => {
  const ids = (await collect(client.models.list())).map((model) => model.id);
  assert.deepEqual(ids, ["smol", "alias"]);
  assert.equal((await client.models.retrieve("alias")).object, "model");
});

test("whole", async () => {
  const answer = await client.completions.create(greedy);
  assert.match(answer.choices[0].text, /Paris/);
  assert.equal(answer.choices[0].finish_reason, "length");
  assert.deepEqual(
    [answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens],
    [5, 8, 13],
  );
});

test("streamed, with usage", async () => {
  const stream_options = { include_usage: true };
  const chunks = await collect(
    await client.completions.create({ ...greedy, stream: true, stream_options }),
  );
  const last = chunks.pop();
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), expected);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, 8);
});

test("several prompts and choices", async () => {
  const answer = await client.completions.create({ ...greedy, prompt: [prompt, prompt], n: 2 });
  assert.deepEqual(
    answer.choices.map((choice) => [choice.index, choice.text]),
    [0, 1, 2, 3].map((index) => [index, expected]),
  );
});

test("a seed repeats itself", async () => {
  const drawn = { ...greedy, temperature: 1, seed: 4, n: 2 };
  const [first, again] = await Promise.all([1, 2].map(() => client.completions.create(drawn)));
  const texts = (answer) => answer.choices.map((choice) => choice.text);
  assert.deepEqual(texts(first), texts(again));
  assert.equal(new Set(texts(first)).size, 2);
});

test("stop, logprobs, echo and bias", async () => {
  const stopped = await client.completions.create({ ...greedy, stop: [" Paris"] });
  assert.equal(stopped.choices[0].finish_reason, "stop");
  assert.equal(stopped.choices[0].text, expected.split(" Paris")[0]);
  const { choices } = await client.completions.create({ ...greedy, logprobs: 2, echo: true });
  const told = choices[0].logprobs;
  assert.equal(told.tokens.join(""), prompt + expected);
  assert.equal(told.token_logprobs[0], null);
  assert.equal(Object.keys(told.top_logprobs[5]).length, 2);
  const { tokens } = await client.post("/../tokenize", { body: { prompt: " London" } });
  const biased = await client.completions.create({
    ...greedy,
    max_tokens: 1,
    logit_bias: { [tokens[0]]: 100 },
  });
  assert.equal(biased.choices[0].text, " London");
});

test("tokens there and back", async () => {
  const { tokens, count } = await client.post("/../tokenize", { body: { prompt } });
  assert.equal(count, 5);
  assert.deepEqual(await client.post("/../detokenize", { body: { tokens } }), { prompt });
});

test("parallel calls get their own answers", async () => {
  const prompts = [..."12345678"].map((digit) => `${digit}, `);
  const ask = async (one) => (await client.completions.create({ ...greedy, prompt: one })).choices[0].text;
  const together = await Promise.all(prompts.map(ask));
  const alone = [];
  for (const one of prompts) alone.push(await ask(one));
  assert.deepEqual(together, alone);
});
