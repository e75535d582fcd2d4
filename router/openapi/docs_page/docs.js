// The API's page: what /openapi.json says, for people. Text never becomes markup.

const METHODS = ["get", "post", "patch", "put", "delete"];
const DEEPEST = 8;

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

function nameOf(schema) {
  return schema.$ref.split("/").at(-1);
}

// What a schema allows, in few words.
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.allOf) return schema.allOf.map(typeOf).join(" & ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  if (Array.isArray(schema.type)) return schema.type.join(" | ");
  return schema.type ?? "anything";
}

// The objects that a schema speaks of, without those of its own.
function refsIn(schema) {
  if (!schema || typeof schema !== "object") return [];
  if (schema.$ref) return [nameOf(schema)];
  return Object.values(schema).flatMap(refsIn);
}

function fieldsOf(schema) {
  if (schema.properties) return schema;
  if (schema.items) return fieldsOf(schema.items);
  return (schema.anyOf ?? schema.allOf ?? []).map(fieldsOf).find((each) => each) ?? null;
}

function table(schema, schemas, depth, seen) {
  const rows = element("table", null);
  const required = new Set(schema.required ?? []);
  for (const [name, field] of Object.entries(schema.properties)) {
    const type = element("td", null, element("code", typeOf(field)));
    const inner = fieldsOf(field);
    if (inner && depth < DEEPEST) {
      const more = element("details", null, element("summary", "its fields"));
      more.append(table(inner, schemas, depth + 1, seen));
      type.append(more);
    }
    for (const ref of new Set(refsIn(field))) {
      if (!seen.includes(ref) && depth < DEEPEST) type.append(named(ref, schemas, depth + 1, seen));
    }
    const row = element("tr", null, element("td", null, element("code", name)), type);
    row.append(element("td", required.has(name) ? "required" : ""));
    rows.append(row);
  }
  return rows;
}

// A named schema, drawn when it is opened.
function named(name, schemas, depth, seen) {
  const made = element("details", null, element("summary", name));
  made.addEventListener("toggle", () => {
    if (made.childElementCount > 1) return;
    made.append(drawn(schemas[name] ?? {}, schemas, depth, [...seen, name]));
  });
  return made;
}

function drawn(schema, schemas, depth, seen) {
  if (schema.$ref) return drawn(schemas[nameOf(schema)] ?? {}, schemas, depth, [...seen, nameOf(schema)]);
  if (schema.properties) return table(schema, schemas, depth, seen);
  const made = element("div", null, element("code", typeOf(schema)));
  for (const ref of new Set(refsIn(schema))) {
    if (!seen.includes(ref) && depth < DEEPEST) made.append(named(ref, schemas, depth + 1, seen));
  }
  return made;
}

function answers(responses, schemas) {
  const rows = element("table", null);
  for (const [status, response] of Object.entries(responses)) {
    const what = element("td", response.description);
    for (const [type, { schema }] of Object.entries(response.content ?? {})) {
      what.append(element("div", null, element("code", `${type}: ${typeOf(schema)}`)));
      if (schema.$ref) what.append(named(nameOf(schema), schemas, 0, []));
    }
    rows.append(element("tr", null, element("th", status), what));
  }
  return rows;
}

function parametersOf(operation) {
  const rows = element("table", null);
  for (const { name, schema, required, in: place } of operation.parameters) {
    const type = element("td", null, element("code", typeOf(schema)));
    const row = element("tr", null, element("td", null, element("code", name)), type);
    row.append(element("td", `in the ${place}${required ? ", required" : ""}`));
    rows.append(row);
  }
  return rows;
}

function operationOf(method, path, operation, schemas) {
  const head = element("summary", null, element("code", method), element("code", path));
  head.firstChild.className = "method";
  const said = element("span", operation.summary);
  said.className = "said";
  head.append(said);
  const made = element("details", null, head);
  made.id = operation.operationId;
  made.addEventListener("toggle", () => {
    if (made.childElementCount > 1) return;
    if (operation.parameters) made.append(element("h3", "Parameters"), parametersOf(operation));
    const body = operation.requestBody?.content["application/json"].schema;
    if (body) made.append(element("h3", `Body: ${typeOf(body)}`), drawn(body, schemas, 0, []));
    made.append(element("h3", "Answers"), answers(operation.responses, schemas));
  });
  return made;
}

function show(description) {
  document.getElementById("description").textContent = description.info.description;
  for (const { name } of description.tags) {
    const heading = element("h2", name);
    heading.id = `group-${name}`;
    const link = element("a", name);
    link.href = `#${encodeURIComponent(heading.id)}`;
    document.getElementById("groups").append(link);
    const main = document.getElementById("operations");
    main.append(heading);
    for (const [path, item] of Object.entries(description.paths)) {
      for (const method of METHODS) {
        if (!item[method]?.tags.includes(name)) continue;
        main.append(operationOf(method, path, item[method], description.components.schemas));
      }
    }
  }
}

try {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`status ${response.status}`);
  show(await response.json());
} catch (error) {
  const notice = document.getElementById("notice");
  notice.textContent = `The document cannot be read: ${error.message}`;
  notice.hidden = false;
}
