// The sinks of a step in all patterns of the level.

const LINES = 24;

// Every sink of the level at a step: {layer, head, key, score, threshold}, strongest first.
function sinksAt(recorded, levelName, step, rule) {
  const { layers, heads } = recorded.level(levelName);
  const found = [];
  for (let layer = 0; layer < layers; layer += 1) {
    for (let head = 0; head < heads; head += 1) {
      for (const entry of sinksOf(recorded, recorded.pattern(levelName, layer, head), step, rule)) {
        found.push({ layer, head, ...entry });
      }
    }
  }
  const sign = recorded.stored.get(rule.name)?.low ? -1 : 1;
  return found.sort((a, b) => sign * (b.score - a.score) || a.layer - b.layer || a.head - b.head || a.key - b.key);
}

function countSinks(pane, state) {
  pane.sinks = sinksAt(pane.recorded, state.level, pane.step, state.rule);
  pane.heads = new Map();
  for (const { key } of pane.sinks) pane.heads.set(key, (pane.heads.get(key) ?? 0) + 1);
}

function paintSinks(pane, state) {
  const table = pane.root.querySelector("table.sinks");
  const unit = { head: "head", layer: "layer", model: "pattern" }[state.level];
  const { layers, heads } = pane.size;
  const all = findsAll(pane.recorded, state.rule, pane.step);
  pane.root.querySelector(".count").textContent =
    `${all ? counted(pane.sinks.length, "sink") : `${pane.sinks.length} or more sinks`} at ${counted(pane.heads.size, "position")} in ${counted(layers * heads, unit)}`;
  const lines = pane.listing.value === "key" ? linesByKey(pane, table, `${unit}s`) : linesByHead(pane, state, table);
  table.tBodies[0].replaceChildren(...lines.slice(0, pane.lines).map((line) => line()));
  pane.more.hidden = lines.length <= pane.lines;
  pane.more.textContent = `Show more (${Math.max(0, lines.length - pane.lines)} left)`;
}

function linesByKey(pane, table, unit) {
  const { recorded } = pane;
  header(table, ["position", "token", "state", unit, "strongest score", "in"]);
  const strongest = new Map();
  for (const sink of pane.sinks) if (!strongest.has(sink.key)) strongest.set(sink.key, sink);
  const keys = [...strongest.keys()].sort((a, b) => pane.heads.get(b) - pane.heads.get(a) || a - b);
  return keys.map((key) => () => {
    const best = strongest.get(key);
    const line = row(recorded.place(key), tokenAt(pane, key), stateOf(pane, key), String(pane.heads.get(key)), scored(best.score), go(pane, best));
    line.dataset.key = key;
    return line;
  });
}

function linesByHead(pane, state, table) {
  const { recorded } = pane;
  header(table, ["where", "position", "token", "state", "score", "threshold"]);
  return pane.sinks.map((sink) => () => {
    const line = row(go(pane, sink), recorded.place(sink.key), tokenAt(pane, sink.key), stateOf(pane, sink.key), scored(sink.score), scored(sink.threshold));
    line.dataset.key = sink.key;
    return line;
  });
}

// A button that selects the pattern of a sink.
function go(pane, { layer, head }) {
  const { layers, heads } = pane.recorded.about;
  const [l, h] = [layers[layer] ?? layer, heads[head]];
  const button = make("button", "go", { head: `L${l} H${h}`, layer: `L${l}`, model: "mean" }[pane.level]);
  button.setAttribute("aria-label", { head: `layer ${l}, head ${h}`, layer: `layer ${l}`, model: "mean of all" }[pane.level]);
  button.type = "button";
  button.addEventListener("click", () => pane.choose(layer, head));
  return button;
}
