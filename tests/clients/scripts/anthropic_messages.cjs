// Anthropic's library for Node on Messages: what it saw of each scene, as one JSON object.
const { Anthropic } = require("@anthropic-ai/sdk");
const { act } = require("./acting.cjs");

const url = process.argv[2];
const model = "talking";
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const asked = (content) => ({ model, max_tokens: 2000, messages: [{ role: "user", content }] });
const weather = {
  name: "weather",
  description: "The weather in a city.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};
const callsOf = (message) =>
  message.content.filter((block) => block.type === "tool_use").map((block) => [block.name, block.input]);

const scenes = {
  async plain() {
    const answer = await client.messages.create({ ...asked("Say hello."), system: "Be kind." });
    return { ...answer, request_id: answer._request_id };
  },

  async streamed() {
    const stream = await client.messages.create({ ...asked("Say hello."), stream: true });
    const events = [];
    for await (const event of stream) events.push(event);
    const texts = events.filter((event) => event.type === "content_block_delta").map((event) => event.delta.text);
    return { text: texts.join(""), last: events.at(-1).type };
  },

  async byTheStreamHelper() {
    const stream = client.messages.stream({ ...asked("What is the weather in Paris and Rome?"), tools: [weather] });
    const final = await stream.finalMessage();
    return { calls: callsOf(final), stop: final.stop_reason };
  },

  async runTools() {
    const cities = [];
    const run = ({ city }) => {
      cities.push(city);
      return "21 degrees";
    };
    const runner = client.beta.messages.toolRunner({
      ...asked("What is the weather in Paris?"),
      tools: [{ ...weather, run, parse: (input) => input }],
    });
    const usages = [];
    let last;
    for await (last of runner) usages.push(last.usage);
    return { text: last.content[0].text, cities, usages };
  },

  async thinking() {
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const stream = client.messages.stream({ ...asked("What is the sky like?"), thinking });
    const final = await stream.finalMessage();
    return final.content.map((block) => [block.type, (block.thinking ?? block.text).trim()]);
  },

  async cached() {
    const cache_control = { type: "ephemeral", ttl: "1h" };
    const system = [{ type: "text", text: "The same rules for Node. ".repeat(200), cache_control }];
    const usages = [];
    for (let turn = 0; turn < 2; turn += 1) {
      usages.push((await client.messages.create({ ...asked("Say hello."), system })).usage);
    }
    return usages;
  },

  async counted() {
    const { messages } = asked("Say hello.");
    return (await client.messages.countTokens({ model, messages })).input_tokens;
  },

  async models() {
    const listed = [];
    for await (const each of client.models.list()) listed.push(each.id);
    return [listed, (await client.models.retrieve(model)).id];
  },

  async aborted() {
    const stream = await client.messages.create({
      ...asked("Nobody has a rule for this."),
      max_tokens: 100000,
      stream: true,
    });
    let seen = 0;
    for await (const event of stream) {
      seen += event.type === "content_block_delta" ? 1 : 0;
      if (seen >= 3) stream.controller.abort();
    }
    return seen;
  },

  async refused() {
    try {
      await client.messages.create({ ...asked("Say hello."), model: "absent" });
    } catch (error) {
      return { name: error.constructor.name, status: error.status, type: error.type, id: error.requestID };
    }
    throw new Error("nothing was raised");
  },
};

act(scenes);
