// Facts about the recording: its size, its scale, and which scores this file holds exactly.

function aboutText({ about, keys, steps }) {
  const level = about.levels[0];
  return [
    about.model ? `model ${about.model}` : "",
    counted(steps, "step"),
    about.layers.length ? counted(level.layers, "layer") : "",
    level.name === "head" ? counted(level.heads, "head") : "",
    `${counted(keys - about.learned, "position")}${about.learned ? ` and ${counted(about.learned, "learned sink token")}` : ""}`,
    `n = 1 sequence (row ${about.row}${about.some_rows ? "" : ` of ${about.rows}`})`,
    `scale: ${about.scale}`,
    `queries: ${about.queries}`,
  ].filter(Boolean).join(" \u00b7 ");
}

function exactText({ scores }) {
  const { exact } = scores;
  if (exact.all) return "All scores are in this file exactly (as recorded).";
  const limits = exact.limits;
  return `The scores of at least the ${exact.fewest} strongest keys of every pattern and step are exact ` +
    `(${exact.scores.toLocaleString("en")} of ${exact.of.toLocaleString("en")}); every number in a table is one of them. ` +
    `Of the other scores the file holds the bin of their colour, with borders at ${scores.edges.map(number).join(", ")}. ` +
    `All sinks are found from eps = ${limits["above-mean"]}, k = ${limits["above-std"]} standard deviations, and up to top ${limits["top-k"]}.`;
}

function paintFacts(pane) {
  const { about } = pane.recorded;
  const lines = [
    ["scores", pane.recorded.exactText()],
    ["undefined", `keys visible to fewer than ${about.min_viewers} counted queries have no score`],
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
  // Without a tokenizer there are token ids instead of text.
  final.querySelector("summary").textContent = about.text === null ? "Final tokens" : "Final text";
  final.querySelector(".text").textContent = about.text ?? finalTokens(pane.recorded);
}

function finalTokens(recorded) {
  const keys = recorded.about.positions.map((_, key) => key).filter((key) => recorded.about.positions[key] >= 0);
  return keys.map((key) => visible(recorded.text(recorded.steps, key))).join(" ");
}

// The sentence below the controls: the rule, and what of its sinks the page knows at the panes' steps.
function limitText(panes, rule, level) {
  const recordings = panes.map((pane) => pane.recorded);
  if (rule.value === null) return storedText(recordings.map((recorded) => recorded.stored.get(rule.name)), level);
  const short = panes.filter((pane) => !findsAll(pane.recorded, rule, pane.step));
  if (!short.length) return `${RULES[rule.name].formula(rule.value)}. The page finds what find_sinks finds.`;
  const limits = short.map((pane) => limitOf(pane.recorded, rule, pane.step));
  const [side, limit] = rule.name === "top-k" ? ["up to", Math.min(...limits)] : ["from", Math.max(...limits)];
  const setting = rule.name === "soft-sigmoid" ? RULES["above-std"].setting : RULES[rule.name].setting;
  return `${RULES[rule.name].formula(rule.value)}. This page holds all sinks ${side} ${setting} = ${limit}; ` +
    "at this setting only the strongest keys are listed, and counts are lower bounds. Main sinks are exact.";
}

function storedText([{ name, formula, scale, levels }], level) {
  const sentences = [
    `${name}${formula ? `: ${formula}` : ""}.`,
    "The sinks are those that find_sinks found; the page cannot change the setting of this rule.",
    `Scores of sinks are on the scale of the rule (${scale}); colours and the strongest keys show received attention.`,
  ];
  if (!levels.includes(level)) sentences.push(`It has sinks at the level ${levels.join(", ")} only.`);
  return sentences.join(" ");
}
