// OpenAI's library for Node with tools and formats: what it saw of each scene, as a last line of JSON.
const { OpenAI } = require("openai");

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

(async () => {
  const seen = {};
  for (const [name, scene] of Object.entries(scenes)) {
    try {
      seen[name] = await scene();
    } catch (error) {
      seen[name] = { raised: error.constructor.name, trace: String(error.stack) };
    }
  }
  process.stdout.write(`${JSON.stringify(seen)}\n`);
})();
