// The grid of layers and heads: the main sink of each at this step.

const GRID_LEFT = 30;
const GRID_TOP = 18;

function gridShape(pane) {
  const { layers, heads } = pane.size;
  const room = Math.max(120, pane.rooms.grid - 2);
  const width = Math.max(6, Math.min(60, (room - GRID_LEFT) / heads));
  const height = Math.max(8, Math.min(32, 460 / layers));
  return { layers, heads, width, height };
}

function paintGrid(pane, state) {
  const { recorded, step, grid, look } = pane;
  const shape = gridShape(pane);
  const pen = sized(grid, GRID_LEFT + shape.width * shape.heads + 2, GRID_TOP + shape.height * shape.layers + 2);
  pen.font = `${Math.min(11, shape.height - 1)}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  paintGridAxes(pen, pane, shape);
  for (let layer = 0; layer < shape.layers; layer += 1) {
    for (let head = 0; head < shape.heads; head += 1) {
      const [main] = sinksOf(recorded, recorded.pattern(state.level, layer, head), step, state.rule);
      const shade = (sink) => receivedScore(recorded, recorded.pattern(state.level, layer, head), step, sink, state.rule);
      const [x, y] = [GRID_LEFT + head * shape.width, GRID_TOP + layer * shape.height];
      pen.fillStyle = look.css("--blank");
      if (main) pen.fillStyle = pane.gridColour.value === "score" ? look.colours(shade(main)).ground : POSITIONS[main.key % POSITIONS.length];
      pen.fillRect(x + 0.5, y + 0.5, shape.width - 1, shape.height - 1);
      if (isMoving(recorded, recorded.pattern(state.level, layer, head))) paintMover(pen, look, x, y, shape);
      if (!main || shape.width < 20 || shape.height < 11) continue;
      pen.fillStyle = pane.gridColour.value === "score" ? look.colours(shade(main)).ink : "#000";
      pen.textAlign = "center";
      pen.fillText(shortPlace(recorded, main.key), x + shape.width / 2, y + shape.height / 2, shape.width - 2);
    }
  }
  const [layer, head] = pane.chosen;
  const [x, y] = [GRID_LEFT + head * shape.width, GRID_TOP + layer * shape.height];
  pen.lineWidth = 3;
  pen.strokeStyle = look.css("--ground");
  pen.strokeRect(x - 0.5, y - 0.5, shape.width + 1, shape.height + 1);
  pen.lineWidth = 2;
  pen.strokeStyle = look.css("--mark");
  pen.strokeRect(x, y, shape.width, shape.height);
  pane.root.querySelector(".chosen").replaceChildren(...chosenText(pane, state));
  pane.root.querySelector(".movers").textContent = moverText(pane);
  grid.setAttribute("aria-label", pane.root.querySelector(".chosen").textContent);
}

// Whether dl.trajectories calls the pattern moving, by the rule with which the page starts.
function isMoving(recorded, pattern) {
  return recorded.about.kinds[pattern] === "m";
}

// A triangle in the upper right corner of a cell.
function paintMover(pen, look, x, y, { width, height }) {
  const side = Math.max(4, Math.min(10, width / 2, height / 2));
  pen.beginPath();
  pen.moveTo(x + width - 0.5 - side, y + 0.5);
  pen.lineTo(x + width - 0.5, y + 0.5);
  pen.lineTo(x + width - 0.5, y + 0.5 + side);
  pen.closePath();
  pen.fillStyle = look.css("--mark");
  pen.fill();
  pen.lineWidth = 1;
  pen.strokeStyle = look.css("--rim");
  pen.stroke();
}

function moverText(pane) {
  const { about } = pane.recorded;
  if (!about.kinds) return "";
  const { first, layers, heads } = pane.size;
  const kinds = about.kinds.slice(first, first + layers * heads);
  const count = [...kinds].filter((kind) => kind === "m").length;
  const what = pane.level === "head" ? "heads" : pane.level === "layer" ? "layers" : "means";
  return `Corner: the sink moves over the run (${count} of ${layers * heads} ${what}; trajectories, ${about.moved_by}).`;
}

function shortPlace(recorded, key) {
  const position = recorded.about.positions[key];
  return position < 0 ? `s${-1 - position}` : String(position);
}

function paintGridAxes(pen, pane, { layers, heads, width, height }) {
  const { about } = pane.recorded;
  pen.fillStyle = pane.look.css("--soft");
  const everyHead = Math.ceil(22 / width);
  const everyLayer = Math.ceil(11 / height);
  pen.textAlign = "center";
  for (let head = 0; head < heads; head += everyHead) {
    pen.fillText(heads > 1 || pane.level === "head" ? about.heads[head] : "mean", GRID_LEFT + (head + 0.5) * width, GRID_TOP / 2);
  }
  pen.textAlign = "right";
  for (let layer = 0; layer < layers; layer += everyLayer) {
    pen.fillText(pane.level === "model" ? "all" : (about.layers[layer] ?? layer), GRID_LEFT - 5, GRID_TOP + (layer + 0.5) * height);
  }
}

function numbered(name, numbers) {
  const [first, last] = [numbers[0], numbers[numbers.length - 1]];
  const several = numbers.length > 2 && numbers.every((number, place) => number === first + place);
  return `${name}${numbers.length > 1 ? "s" : ""} ${several ? `${first} to ${last}` : numbers.join(", ")}`;
}

function patternText(pane) {
  const { about } = pane.recorded;
  const [layer, head] = pane.chosen;
  const heads = about.some_heads.join(", ");
  if (pane.level === "model") {
    // The recording does not hold how many layers the model has, so that these may be some of them.
    const layers = about.some_layers.length ? ` of ${numbered("layer", about.some_layers)}` : "";
    return `mean of ${heads ? `heads ${heads}` : "all heads"}${layers}`;
  }
  const where = `layer ${about.layers[layer] ?? layer}`;
  return pane.level === "layer" ? `${where}, mean of ${heads ? `heads ${heads}` : "its heads"}` : `${where}, head ${about.heads[head]}`;
}

function chosenText(pane, state) {
  const { recorded, step } = pane;
  const [main] = sinksOf(recorded, pane.pattern, step, state.rule);
  const where = `${patternText(pane)}: `;
  const moving = isMoving(recorded, pane.pattern) ? "; its sink moves over the run" : "";
  if (!main) return [`${where}no sink${moving}`];
  const masked = recorded.isMasked(step, main.key);
  return [`${where}main sink at ${recorded.about.positions[main.key] < 0 ? "" : "position "}${recorded.place(main.key)} (`, ...(masked ? [recorded.about.open] : ['"', token(recorded.text(step, main.key), 24), '"']), `), score ${main.score.toFixed(3)}${moving}`];
}

// The [layer, head] to which a key of the keyboard moves in the grid; null for other keys.
function gridMove(pane, key) {
  const { layers, heads } = pane.size;
  const [layer, head] = pane.chosen;
  const moves = {
    ArrowUp: [layer - 1, head], ArrowDown: [layer + 1, head], ArrowLeft: [layer, head - 1], ArrowRight: [layer, head + 1],
    Home: [layer, 0], End: [layer, heads - 1], PageUp: [0, head], PageDown: [layers - 1, head],
  };
  if (!(key in moves)) return null;
  const [toLayer, toHead] = moves[key];
  return [Math.min(Math.max(toLayer, 0), layers - 1), Math.min(Math.max(toHead, 0), heads - 1)];
}

function gridAt(pane, event) {
  const { layers, heads, width, height } = gridShape(pane);
  const [layer, head] = [Math.floor((event.offsetY - GRID_TOP) / height), Math.floor((event.offsetX - GRID_LEFT) / width)];
  return layer >= 0 && layer < layers && head >= 0 && head < heads ? [layer, head] : null;
}
