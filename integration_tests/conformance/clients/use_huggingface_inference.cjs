// `@huggingface/inference`: chat, text generation, streams, tools, errors; the server as
// `endpointUrl`, with and without a path, and through `endpoint()`.
"use strict";

const assert = require("node:assert/strict");
const { InferenceClient, InferenceClientProviderApiError } = require("@huggingface/inference");
const { URL, API_KEY, QUESTION, ANSWER, check, run, thrown, isWeather } = require("./checks.cjs");

const client = new InferenceClient(API_KEY);
const endpoint = client.endpoint(URL);
const GREEDY = {
  messages: [{ role: "user", content: QUESTION }],
  max_tokens: 60,
  temperature: 0,
};
const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Oslo"] },
    unit: { type: "string", enum: ["celsius", "fahrenheit"] },
  },
  required: ["city", "unit"],
  additionalProperties: false,
};
const TOOL = { type: "function", function: { name: "get_weather", description: "The weather", parameters: WEATHER } };

check(async function chat() {
  const asked = [
    [client, { ...GREEDY, endpointUrl: URL }], // it sends no model
    [client, { ...GREEDY, endpointUrl: `${URL}/v1/chat/completions`, model: "gpt-3.5-turbo" }],
    [client, { ...GREEDY, endpointUrl: `${URL}/v1`, model: "tgi" }],
    [endpoint, GREEDY],
  ];
  for (const [one, body] of asked) {
    const answer = await one.chatCompletion(body);
    assert.equal(answer.choices[0].message.content, ANSWER);
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.usage.completion_tokens, 20);
    assert(answer.id && answer.created > 1_700_000_000);
  }
});

check(async function chatStream() {
  const chunks = [];
  for await (const chunk of endpoint.chatCompletionStream(GREEDY)) chunks.push(chunk);
  const text = chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join("");
  assert.equal(text, ANSWER);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
  assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
});

check(async function chatLogprobs() {
  const answer = await endpoint.chatCompletion({ ...GREEDY, logprobs: true, top_logprobs: 2 });
  const steps = answer.choices[0].logprobs.content;
  assert.equal(steps.map((step) => step.token).join(""), ANSWER);
  assert(steps.every((step) => step.top_logprobs.length === 2 && step.logprob <= 0));
});

check(async function tools() {
  const asked = { ...GREEDY, max_tokens: 150, tools: [TOOL], parallel_tool_calls: false };
  for (const choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
    const answer = await endpoint.chatCompletion({ ...asked, tool_choice: choice });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    isWeather(JSON.parse(call.function.arguments));
  }
  const pieces = [];
  for await (const chunk of endpoint.chatCompletionStream({ ...asked, tool_choice: "required" }))
    for (const call of chunk.choices[0]?.delta?.tool_calls ?? [])
      if (call.index === 0) pieces.push(call.function.arguments ?? "");
  isWeather(JSON.parse(pieces.join("")));
});

check(async function structuredOutput() {
  const format = { type: "json_schema", json_schema: { name: "weather", schema: WEATHER, strict: true } };
  const answer = await endpoint.chatCompletion({ ...GREEDY, response_format: format });
  isWeather(JSON.parse(answer.choices[0].message.content));
});

check(async function textGeneration() {
  const parameters = { max_new_tokens: 40, temperature: 0 };
  for (const [one, where] of [[endpoint, {}], [client, { endpointUrl: URL, model: "tgi" }]]) {
    const answer = await one.textGeneration({ ...where, inputs: QUESTION, parameters });
    assert.equal(answer.generated_text.trim(), ANSWER);
  }
});

check(async function textGenerationStream() {
  const asked = { inputs: QUESTION, parameters: { max_new_tokens: 40, temperature: 0 }, stream: true };
  let text = "";
  for await (const chunk of endpoint.textGenerationStream(asked)) text += chunk.choices[0]?.text ?? "";
  assert.equal(text.trim(), ANSWER);
});

check(async function abort() {
  // A caller that goes away in the middle: the stream ends, and the server serves on.
  const controller = new AbortController();
  const asked = { ...GREEDY, max_tokens: 500, ignore_eos: true };
  const error = await thrown(async () => {
    for await (const _ of endpoint.chatCompletionStream(asked, { signal: controller.signal })) controller.abort();
  });
  assert.equal(error.name, "AbortError");
  assert.equal((await endpoint.chatCompletion(GREEDY)).choices[0].message.content, ANSWER);
});

check(async function typedErrors() {
  const stranger = new InferenceClient("wrong").endpoint(URL);
  const wrongKey = await thrown(() => stranger.chatCompletion(GREEDY));
  assert(wrongKey instanceof InferenceClientProviderApiError, wrongKey);
  assert.equal(wrongKey.httpResponse.status, 401);
  const bad = await thrown(() => endpoint.chatCompletion({ ...GREEDY, temperature: -1 }));
  assert.equal(bad.httpResponse.status, 400);
  assert.match(JSON.stringify(bad.httpResponse.body), /temperature/);
  assert(bad.httpResponse.requestId, "no x-request-id was found");
});

run();
