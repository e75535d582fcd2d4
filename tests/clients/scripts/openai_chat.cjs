// OpenAI's library for Node on Chat Completions: what it saw of each scene, as one JSON object.
const { OpenAI } = require("openai");
const { act } = require("./acting.cjs");

const url = process.argv[2];
const model = "talking";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = (text) => [{ role: "user", content: text }];

const scenes = {
  async plain() {
    return client.chat.completions.create({ model, messages: asked("Say hello.") });
  },

  async streamed() {
    const stream = await client.chat.completions.create({
      model,
      messages: asked("Say hello."),
      stream: true,
      stream_options: { include_usage: true },
    });
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    return {
      text: chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""),
      usages: chunks.filter((chunk) => chunk.usage).map((chunk) => chunk.usage),
    };
  },

  async byTheStreamHelper() {
    const stream = client.chat.completions.stream({ model, messages: asked("Say hello."), n: 2 });
    const final = await stream.finalChatCompletion();
    return final.choices.map((choice) => choice.message.content);
  },

  async aborted() {
    const stream = await client.chat.completions.create({
      model,
      messages: asked("Nobody has a rule for this."),
      max_tokens: 100000,
      stream: true,
    });
    let seen = 0;
    for await (const chunk of stream) {
      seen += chunk.choices.length;
      if (seen >= 3) stream.controller.abort();
    }
    return seen;
  },

  async refused() {
    try {
      await client.chat.completions.create({ model: "absent", messages: asked("Say hello.") });
    } catch (error) {
      return { name: error.constructor.name, status: error.status, code: error.code, id: error.requestID };
    }
    throw new Error("nothing was raised");
  },
};

act(scenes);
