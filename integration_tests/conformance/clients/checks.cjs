// What the JavaScript clients beside this file share: `checks.py` in node.
"use strict";

const assert = require("node:assert/strict");

const [URL_OF_SERVER, API_KEY] = process.argv.slice(2);

// The embedded model knows this by heart, in the chat form and without it.
const QUESTION = "What does textwrap.dedent do?";
const ANSWER = "`dedent(text)`: Remove any common leading whitespace from every line in `text`.";

const checks = [];

/** Registers a check: a named function, plain or async, that throws if the client is not content. */
function check(action) {
  checks.push(action);
}

/** Runs every check in order; the last statement of a script. */
async function run() {
  let failed = false;
  for (const action of checks) {
    const start = performance.now();
    let error = null;
    try {
      await action();
    } catch (thrown) {
      error = thrown?.stack ?? String(thrown);
      failed = true;
    }
    const seconds = (performance.now() - start) / 1000;
    console.log(JSON.stringify({ check: action.name, seconds, error }).replace(/^{"check":/, '{"check": '));
  }
  process.exit(failed ? 1 : 0);
}

/** The error with which an action ends. */
async function thrown(action) {
  let result;
  try {
    result = await action();
  } catch (error) {
    return error;
  }
  assert.fail(`nothing was thrown; the answer was ${JSON.stringify(result)}`);
}

/** An object as the schema of the weather in a city wants it. */
function isWeather(found) {
  assert.deepEqual(Object.keys(found).sort(), ["city", "unit"]);
  assert(["Paris", "Oslo"].includes(found.city), JSON.stringify(found));
  assert(["celsius", "fahrenheit"].includes(found.unit), JSON.stringify(found));
}

module.exports = { URL: URL_OF_SERVER, API_KEY, QUESTION, ANSWER, check, run, thrown, isWeather };
