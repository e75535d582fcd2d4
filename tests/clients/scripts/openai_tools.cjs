// OpenAI's library for Node with tools and formats: what it saw of each scene, as a last line of JSON.
const { OpenAI } = require("openai");
const { act } = require("./acting.cjs");

const url = process.argv[2];
const model = "talking";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = (text) => [{ role: "user", content: text }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

const scenes = {
  async runTools() {
    const cities = [];
    const weather = ({ city }) => {
      cities.push(city);
      return "21 degrees";
    };
    const tool = { name: "weather", parameters, function: weather, parse: JSON.parse, description: "It." };
    const runner = client.chat.completions.runTools({
      model,
      messages: asked("What is the weather in Paris?"),
      tools: [{ type: "function", function: tool }],
    });
    return { text: await runner.finalContent(), cities };
  },

  async streamedTools() {
    const stream = client.chat.completions.stream({
      model,
      messages: asked("What is the weather in Paris and Rome?"),
      tools: [{ type: "function", function: { name: "weather", parameters } }],
    });
    const [choice] = (await stream.finalChatCompletion()).choices;
    const calls = choice.message.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
    return { calls, finish: choice.finish_reason };
  },

  async thinking() {
    const messages = asked("Think about the weather in Oslo");
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const usages = [];
    for (let turn = 0; turn < 2; turn += 1) {
      const stream_options = { include_usage: true };
      const stream = client.chat.completions.stream({ model, messages, tools, stream_options });
      const answer = await stream.finalChatCompletion();
      const { message } = answer.choices[0];
      usages.push(answer.usage);
      messages.push(message);
      for (const { id } of message.tool_calls ?? []) {
        messages.push({ role: "tool", tool_call_id: id, content: "5 degrees" });
      }
    }
    return { reasoning: messages[1].reasoning_content, text: messages.at(-1).content, usages };
  },

  async parsed() {
    const schema = {
      type: "object",
      properties: { name: { type: "string" }, age: { type: "integer" } },
      required: ["name", "age"],
      additionalProperties: false,
    };
    const answer = await client.chat.completions.create({
      model,
      messages: asked("Who wrote the first program?"),
      response_format: { type: "json_schema", json_schema: { name: "author", schema, strict: true } },
    });
    return JSON.parse(answer.choices[0].message.content);
  },

  async responses() {
    const answer = await client.responses.create({ model, input: "Say hello." });
    const stream = client.responses.stream({ model, input: "Say hello." });
    const streamed = await stream.finalResponse();
    return { texts: [answer.output_text, streamed.output_text], usage: streamed.usage };
  },
};

act(scenes);
