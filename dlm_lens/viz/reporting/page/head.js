// One pattern: its sinks over the steps, and the keys with the highest scores.

const PATH_LEFT = 46;
const PATH_BOTTOM = 30;

function pathShape(pane) {
  const width = Math.max(200, pane.rooms.path - 2);
  const height = Math.min(460, Math.max(200, pane.recorded.keys * 6));
  const { steps, keys } = pane.recorded;
  return { width: width - PATH_LEFT - 6, height: height - PATH_BOTTOM - 6, steps, keys, full: [width, height] };
}

// The scores of all steps as an image of a dot per (step, key); drawn again when what it shows has changed.
function pathImage(pane) {
  const { recorded, pattern, look } = pane;
  const shown = [pattern, look.theme, look.highest, recorded.known(pattern)].join(" ");
  if (pane.pathShown !== shown) {
    pane.pathDrawn = drawnPath(recorded, pattern, look);
    pane.pathShown = shown;
  }
  return pane.pathDrawn;
}

function drawnPath(recorded, pattern, look) {
  const image = document.createElement("canvas");
  [image.width, image.height] = [recorded.steps, recorded.keys];
  const pen = image.getContext("2d");
  const dots = pen.createImageData(recorded.steps, recorded.keys);
  // Bluish, since masked keys with low scores are grey.
  const blank = look.theme === "light" ? [190, 214, 250] : [34, 52, 92];
  const veil = look.theme === "light" ? 120 : 150;
  for (let step = 0; step < recorded.steps; step += 1) {
    for (let key = 0; key < recorded.keys; key += 1) {
      const bin = recorded.bin(pattern, step, key);
      let rgb = bin ? look.rgb(middle(bin)) : blank;
      if (bin && recorded.isMasked(step, key)) rgb = rgb.map((c) => Math.round(0.8 * c + 0.2 * veil));
      dots.data.set([...rgb, 255], 4 * (key * recorded.steps + step));
    }
  }
  pen.putImageData(dots, 0, 0);
  return image;
}

function paintPath(pane, state) {
  const shape = pathShape(pane);
  const pen = sized(pane.path, ...shape.full);
  const [dx, dy] = [shape.width / shape.steps, shape.height / shape.keys];
  const spot = (step, key) => [PATH_LEFT + (step + 0.5) * dx, 6 + (key + 0.5) * dy];
  pen.imageSmoothingEnabled = false;
  pen.drawImage(pathImage(pane), PATH_LEFT, 6, shape.width, shape.height);
  pen.strokeStyle = pane.look.css("--soft");
  pen.lineWidth = 1;
  const [now] = spot(pane.step, 0);
  pen.strokeRect(now - dx / 2, 6, Math.max(dx, 2), shape.height);
  const radius = Math.max(1.5, Math.min(5, dx * 0.42));
  const places = new Map();
  for (let step = 0; step < shape.steps; step += 1) {
    const sinks = sinksOf(pane.recorded, pane.pattern, step, state.rule);
    const [largest] = pane.recorded.strongest(pane.pattern, step);
    for (const { key } of sinks) if (key !== largest?.key) mark(pen, pane.look, spot(step, key), radius * 0.45, true);
    if (largest) mark(pen, pane.look, spot(step, largest.key), radius, sinks.some(({ key }) => key === largest.key));
    if (sinks.length) places.set(sinks[0].key, (places.get(sinks[0].key) ?? 0) + 1);
  }
  paintPathAxes(pen, pane, shape, spot);
  pane.summary.replaceChildren(...pathText(pane, places));
  pane.path.setAttribute("aria-label", `${patternText(pane)}. ${pane.summary.textContent}`);
}

function mark(pen, look, [x, y], radius, filled) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.lineWidth = 1;
  pen.strokeStyle = look.css(filled ? "--rim" : "--mark");
  pen.fillStyle = look.css(filled ? "--mark" : "--ground");
  pen.fill();
  pen.stroke();
}

const LABEL = 12; // pixels of a label, at least

// The keys that have labels: every fourth, eighth, ... position, and learned sink tokens as far as there is room.
function namedKeys(pane, shape) {
  const { positions } = pane.recorded.about;
  const [dy, named] = [shape.height / shape.keys, []];
  const everyKey = Math.max(1, Math.ceil(14 / dy / 4) * 4);
  const first = dy < 5 ? -1 : positions.findIndex((position) => position < 0);
  for (let key = 0; key < shape.keys; key += 1) {
    const learned = positions[key] < 0;
    if (learned ? first < 0 : key % everyKey) continue;
    if (!learned && first >= 0 && (first - key) * dy < LABEL) continue;
    if (learned && key !== first && (key - named[named.length - 1]) * dy < LABEL) continue;
    named.push(key);
  }
  return named;
}

function paintPathAxes(pen, pane, shape, spot) {
  const { recorded } = pane;
  pen.fillStyle = pane.look.css("--soft");
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const key of namedKeys(pane, shape)) pen.fillText(recorded.place(key), PATH_LEFT - 5, spot(0, key)[1]);
  pen.textAlign = "center";
  const everyStep = Math.max(1, Math.ceil((28 * shape.steps) / shape.width));
  for (let step = 0; step < shape.steps; step += everyStep) {
    pen.fillText(recorded.about.steps[step], spot(step, 0)[0], shape.height + 15);
  }
  pen.fillText("step", PATH_LEFT + shape.width / 2, shape.height + 28);
}

function pathText(pane, places) {
  const { recorded } = pane;
  if (recorded.known(pane.pattern) !== "all") return ["Waiting for the kernel, which has the scores of the other steps."];
  const found = [...places].sort((a, b) => b[1] - a[1]);
  if (!found.length) return [`No sink at any of ${counted(recorded.steps, "step")}.`];
  const steps = found.reduce((sum, [, count]) => sum + count, 0);
  const words = [`A sink at ${steps} of ${counted(recorded.steps, "step")}; the main one at `];
  found.slice(0, 4).forEach(([key, count], i) => {
    words.push(`${i ? ", " : ""}${recorded.place(key)} ("`, token(recorded.text(recorded.steps, key), 12), `") ${count}\u00d7`);
  });
  words.push(found.length > 4 ? `, and ${counted(found.length - 4, "other position")}.` : ".");
  return words;
}

function pathAt(pane, event) {
  const { width, steps } = pathShape(pane);
  const step = Math.floor(((event.offsetX - PATH_LEFT) / width) * steps);
  return step >= 0 && step < steps ? step : null;
}

function paintStrongest(pane, state) {
  const { recorded, step, pattern } = pane;
  const table = pane.root.querySelector("table.strongest");
  const summary = recorded.summary(pattern, step);
  const sinks = new Map(sinksOf(recorded, pattern, step, state.rule).map((entry) => [entry.key, entry]));
  header(table, ["position", "token", "state", "score", "threshold", "sink"]);
  table.tBodies[0].replaceChildren(...recorded.strongest(pattern, step).slice(0, 16).map(({ key, score }) => {
    const level = state.rule.value === null || state.rule.name === "top-k" ? NaN : threshold(summary, score, state.rule);
    const line = row(recorded.place(key), tokenAt(pane, key), stateOf(pane, key), scored(score), scored(level), sinks.has(key) ? "yes" : "");
    line.dataset.key = key;
    return line;
  }));
}

function tokenAt(pane, key) {
  return token(pane.recorded.text(pane.step, key), 24);
}

function stateOf(pane, key) {
  const { recorded, step } = pane;
  if (recorded.about.positions[key] < 0) return "learned";
  if (recorded.isMasked(step, key)) return recorded.about.open;
  const { given, positions, prompt } = recorded.about;
  return (given ? given[key] : positions[key] < prompt) ? "prompt" : "written";
}
