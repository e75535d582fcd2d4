// Acts scenes one after the other, and prints what each has seen, or raised, as one JSON object.
exports.act = async (scenes) => {
  const seen = {};
  for (const [name, scene] of Object.entries(scenes)) {
    try {
      seen[name] = await scene();
    } catch (error) {
      seen[name] = { raised: error.constructor.name, trace: String(error.stack) };
    }
  }
  process.stdout.write(`${JSON.stringify(seen)}\n`);
};
