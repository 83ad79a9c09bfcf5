// Vercel's AI SDK: text, streams, objects, tools and agent loops, through its providers for
// OpenAI (chat and responses), OpenAI-compatible servers and Anthropic.
"use strict";

const assert = require("node:assert/strict");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { APICallError, Output, generateText, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const { URL, API_KEY, QUESTION, ANSWER, check, run, thrown, isWeather } = require("./checks.cjs");

globalThis.AI_SDK_LOG_WARNINGS = false;

/** The same model through each provider. */
function models(apiKey = API_KEY) {
  const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey });
  const compatible = createOpenAICompatible({
    name: "pytgi",
    baseURL: `${URL}/v1`,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey });
  return {
    chat: openai.chat("tgi"),
    responses: openai.responses("tgi"),
    compatible: compatible("tgi"),
    anthropic: anthropic("tgi"),
  };
}

const GREEDY = { prompt: QUESTION, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const Weather = z.object({
  city: z.enum(["Paris", "Oslo"]),
  unit: z.enum(["celsius", "fahrenheit"]),
});

/** Calls a function for each of the models; which one it was is told when it throws. */
async function each(action, among = models()) {
  for (const [name, model] of Object.entries(among)) {
    try {
      await action(model, name);
    } catch (error) {
      error.stack = `${name}: ${error.stack}`;
      throw error;
    }
  }
}

check(async function text() {
  await each(async (model) => {
    const answer = await generateText({ ...GREEDY, model });
    assert.equal(answer.text, ANSWER);
    assert.equal(answer.finishReason, "stop");
    assert.equal(answer.usage.outputTokens, 20);
    assert(answer.response.id, "no id");
    assert(answer.response.headers["x-request-id"], "no x-request-id");
  });
});

check(async function completions() {
  const provider = createOpenAI({ baseURL: `${URL}/v1`, apiKey: API_KEY });
  const answer = await generateText({ ...GREEDY, model: provider.completion("tgi") });
  assert(answer.text.length > 0);
});

check(async function options() {
  await each(async (model) => {
    const cut = await generateText({ ...GREEDY, model, maxOutputTokens: 16, system: "Be brief." });
    assert.equal(cut.finishReason, "length");
    assert.equal(cut.usage.outputTokens, 16);
  });
  const { chat, compatible, anthropic } = models();
  await each(async (model) => {
    const answer = await generateText({ ...GREEDY, model, stopSequences: ["(text"] });
    assert.equal(answer.text, "`dedent");
    assert.equal(answer.finishReason, "stop");
  }, { chat, compatible, anthropic });
});

check(async function hints() {
  const providerOptions = {
    openai: { reasoningEffort: "low", textVerbosity: "low", store: true, serviceTier: "auto", user: "somebody" },
    pytgi: { reasoningEffort: "low" },
  };
  const { chat, responses, compatible } = models();
  await each(async (model) => {
    const answer = await generateText({ ...GREEDY, model, providerOptions });
    assert.equal(answer.text, ANSWER);
  }, { chat, responses, compatible });
});

check(async function stream() {
  await each(async (model) => {
    const streamed = streamText({ ...GREEDY, model });
    const pieces = [];
    for await (const piece of streamed.textStream) pieces.push(piece);
    assert.equal(pieces.join(""), ANSWER);
    assert(pieces.length > 1, "it came in one piece");
    assert.equal(await streamed.finishReason, "stop");
    assert.equal((await streamed.usage).outputTokens, 20);
  });
});

check(async function object() {
  await each(async (model) => {
    const asked = { ...GREEDY, model, maxOutputTokens: 150, prompt: "Weather in Paris?" };
    const output = Output.object({ schema: Weather });
    isWeather((await generateText({ ...asked, output })).output);
    const streamed = streamText({ ...asked, output });
    let last;
    for await (const part of streamed.partialOutputStream) last = part;
    isWeather(last);
  });
});

check(async function choice() {
  const { chat, responses, compatible } = models();
  await each(async (model) => {
    const output = Output.choice({ options: ["sunny", "rainy"] });
    const answer = await generateText({ ...GREEDY, model, output });
    assert(["sunny", "rainy"].includes(answer.output), answer.output);
  }, { chat, responses, compatible });
});

/** A tool of the weather, and what it was called with. */
function weatherTool() {
  const called = [];
  const getWeather = tool({
    description: "The weather in a city",
    inputSchema: Weather,
    execute: async (input) => {
      called.push(input);
      return { degrees: 7 };
    },
  });
  return [called, { get_weather: getWeather }];
}

// The small model calls as often as it may, until its tokens are used up.
const ONE_CALL = {
  openai: { parallelToolCalls: false },
  pytgi: { parallel_tool_calls: false },
  anthropic: { disableParallelToolUse: true },
};

/** The first step must call the tool; the next may not. */
const FORCED_ONCE = {
  prompt: "Weather in Paris?",
  temperature: 0,
  maxOutputTokens: 150,
  maxRetries: 0,
  stopWhen: stepCountIs(3),
  providerOptions: ONE_CALL,
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

check(async function tools() {
  await each(async (model) => {
    const [called, tools] = weatherTool();
    const answer = await generateText({ ...FORCED_ONCE, model, tools });
    assert(called.length >= 1, "no call");
    called.forEach(isWeather);
    assert.equal(answer.steps.length, 2);
    assert.equal(answer.steps[0].finishReason, "tool-calls");
    assert(answer.text.length > 0, "no answer behind the result");
  });
});

check(async function namedTool() {
  await each(async (model) => {
    const [called, tools] = weatherTool();
    const toolChoice = { type: "tool", toolName: "get_weather" };
    await generateText({ ...GREEDY, model, tools, toolChoice, providerOptions: ONE_CALL });
    assert(called.length >= 1, "no call");
    called.forEach(isWeather);
  });
});

check(async function streamOfTools() {
  await each(async (model) => {
    const [called, tools] = weatherTool();
    const streamed = streamText({ ...FORCED_ONCE, model, tools });
    const kinds = [];
    for await (const part of streamed.fullStream) {
      if (part.type === "error") throw part.error;
      kinds.push(part.type);
    }
    assert(kinds.indexOf("tool-call") < kinds.indexOf("tool-result"), kinds.join(" "));
    assert(kinds.includes("tool-input-delta"), kinds.join(" "));
    assert.equal((await streamed.steps).length, 2);
    called.forEach(isWeather);
  });
});

check(async function toolsAndObject() {
  const { chat, responses, compatible } = models();
  await each(async (model) => {
    const [called, tools] = weatherTool();
    const output = Output.object({ schema: Weather });
    const answer = await generateText({ ...FORCED_ONCE, model, tools, output });
    assert(called.length >= 1, "no call");
    isWeather(answer.output);
  }, { chat, responses, compatible });
});

check(async function abort() {
  await each(async (model) => {
    const controller = new AbortController();
    const streamed = streamText({ ...GREEDY, model, abortSignal: controller.signal });
    const kinds = [];
    for await (const part of streamed.fullStream) {
      kinds.push(part.type);
      if (part.type === "text-delta") controller.abort();
    }
    assert.equal(kinds.at(-1), "abort");
  });
});

check(async function typedErrors() {
  await each(async (model) => {
    const error = await thrown(() => generateText({ ...GREEDY, model }));
    assert(APICallError.isInstance(error), error);
    assert.equal(error.statusCode, 401);
    assert.match(error.message, /API key/);
  }, models("wrong"));
  await each(async (model) => {
    const error = await thrown(() => generateText({ ...GREEDY, model, maxOutputTokens: 1_000_000 }));
    assert.equal(error.statusCode, 400);
    assert.equal(error.isRetryable, false);
    assert.match(error.message, /maximum context length|exceed context limit/);
  });
});

run();
