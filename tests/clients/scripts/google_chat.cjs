// Google's library for Node on Gemini's API: what it saw of each scene, as one JSON object.
const { GoogleGenAI } = require("@google/genai");
const { act } = require("./acting.cjs");

const url = process.argv[2];
const model = "talking";
const client = new GoogleGenAI({ apiKey: "none", httpOptions: { baseUrl: url } });
const paris = "What is the weather in Paris?";
const weather = {
  name: "weather",
  description: "The weather in a city.",
  parameters: { type: "OBJECT", properties: { city: { type: "STRING" } }, required: ["city"] },
};

const scenes = {
  async plain() {
    const answer = await client.models.generateContent({ model, contents: "Say hello." });
    return { text: answer.text, finish: answer.candidates[0].finishReason, usage: answer.usageMetadata };
  },

  async streamed() {
    const stream = await client.models.generateContentStream({ model, contents: "Say hello." });
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    return { text: chunks.map((chunk) => chunk.text).join(""), usage: chunks.at(-1).usageMetadata };
  },

  async chatted() {
    const chat = client.chats.create({ model });
    const first = await chat.sendMessage({ message: "Say hello." });
    let second = "";
    for await (const chunk of await chat.sendMessageStream({ message: "Count to nine." })) second += chunk.text;
    const last = await chat.sendMessage({ message: "Say hello." });
    const turns = chat.getHistory(true).filter((turn) => turn.role === "user").length;
    return { texts: [first.text, second, last.text], turns };
  },

  async called() {
    const config = { tools: [{ functionDeclarations: [weather] }] };
    const answer = await client.models.generateContent({ model, contents: paris, config });
    const called = [];
    for await (const chunk of await client.models.generateContentStream({ model, contents: paris, config }))
      called.push(...(chunk.functionCalls ?? []));
    return [...answer.functionCalls, ...called].map((call) => [call.name, call.args]);
  },

  async counted() {
    const answer = await client.models.countTokens({ model, contents: "Say hello." });
    return answer.totalTokens;
  },

  async cached() {
    const text = "Rules for Node, all the same. ".repeat(100);
    const made = await client.caches.create({ model, config: { contents: text, ttl: "60s", displayName: "rules" } });
    const config = { cachedContent: made.name };
    const answer = await client.models.generateContent({ model, contents: "Say hello.", config });
    const longer = await client.caches.update({ name: made.name, config: { ttl: "120s" } });
    const names = [];
    for await (const each of await client.caches.list()) names.push(each.name);
    await client.caches.delete({ name: made.name });
    return {
      text: answer.text,
      cached: answer.usageMetadata.cachedContentTokenCount,
      size: made.usageMetadata.totalTokenCount,
      longer: longer.expireTime > made.expireTime,
      listed: names.includes(made.name),
    };
  },

  async refused() {
    try {
      await client.models.generateContent({ model: "absent", contents: "x" });
    } catch (error) {
      return { name: error.constructor.name, status: error.status };
    }
    throw new Error("nothing was raised");
  },
};

act(scenes);
