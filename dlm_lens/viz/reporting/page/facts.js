// What was recorded, on which scale, and how much of it this file holds exactly.

function aboutWords({ about, keys, steps }) {
  const level = about.levels[0];
  return [
    about.model ? `model ${about.model}` : "",
    `${steps} steps`,
    about.layers.length ? `${level.layers} layers` : "",
    level.name === "head" ? `${level.heads} heads` : "",
    `${keys - about.learned} positions${about.learned ? ` and ${about.learned} learned sink token${about.learned > 1 ? "s" : ""}` : ""}`,
    `n = 1 sequence (row ${about.row} of ${about.rows})`,
    `scale: ${about.scale}`,
    `queries: ${about.queries}`,
  ].filter(Boolean).join(" \u00b7 ");
}

function exactWords({ about }) {
  const { exact } = about;
  if (exact.all) return "All scores are in this file exactly (as recorded).";
  const limits = exact.limits;
  return `The scores of the ${exact.fewest} strongest keys of every pattern and step, and of more where more are sinks, are ` +
    `exact (${exact.scores.toLocaleString("en")} of ${exact.of.toLocaleString("en")}); every number in a table is one of them. ` +
    `The others are known by their colour's bin only, with borders at ${about.edges.map(number).join(", ")}. ` +
    `All sinks are found from eps = ${limits["above-mean"]}, k = ${limits["above-std"]} standard deviations, and up to top ${limits["top-k"]}.`;
}

function paintFacts(pane) {
  const { about } = pane.recorded;
  const lines = [
    ["scores", exactWords(pane.recorded)],
    ["undefined", `keys seen by fewer than ${about.viewers} counted queries have no score`],
    ...Object.entries(about.settings).map(([name, value]) => [name, value]),
    ["computed with", Object.entries(about.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ];
  const body = pane.root.querySelector("table.facts").tBodies[0];
  body.replaceChildren(...lines.filter(([, value]) => value !== "").map(([name, value]) => {
    const line = document.createElement("tr");
    const head = make("th", "", name);
    head.scope = "row";
    line.append(head, wrapped(make("bdi", "", value)));
    return line;
  }));
  const final = pane.root.querySelector(".final");
  // Without a tokenizer there is no text, only tokens.
  final.querySelector("summary").textContent = about.text === null ? "Final tokens" : "Final text";
  final.querySelector(".text").textContent = about.text ?? finalTokens(pane.recorded);
}

function finalTokens(recorded) {
  const keys = recorded.about.positions.map((_, key) => key).filter((key) => recorded.about.positions[key] >= 0);
  return keys.map((key) => visible(recorded.word(recorded.steps, key))).join(" ");
}

// What to say below the controls when the rule asks for more than the file holds.
function limitWords(recordings, rule) {
  const short = recordings.filter((recorded) => !findsAll(recorded, rule));
  if (!short.length) return `${RULES[rule.name].words(rule.value)}. The page finds what find_sinks finds.`;
  const limits = short.map((recorded) => recorded.about.exact.limits[rule.name]);
  const [side, limit] = rule.name === "top-k" ? ["up to", Math.min(...limits)] : ["from", Math.max(...limits)];
  return `${RULES[rule.name].words(rule.value)}. This file holds all sinks ${side} ${RULES[rule.name].setting} = ${limit}; ` +
    "here only the strongest keys are listed, and counts are lower bounds. Main sinks are right.";
}
