// The canvas as cells: a token each, coloured by its received attention.

function buildCells(pane) {
  const { recorded, cells } = pane;
  pane.cellOf = [];
  for (let key = 0; key < recorded.keys; key += 1) {
    const cell = make("span", "cell");
    cell.setAttribute("role", "listitem");
    if (recorded.about.positions[key] < 0) cell.classList.add("learned");
    cell.append(make("bdi"));
    pane.cellOf.push(cell);
  }
  cells.replaceChildren(...pane.cellOf);
}

function paintCells(pane, state, other) {
  const { recorded, step } = pane;
  const exact = new Map(recorded.strongest(pane.pattern, step).map((entry) => [entry.key, entry.score]));
  const sinks = new Set(sinksOf(recorded, pane.pattern, step, state.rule).map((entry) => entry.key));
  const patterns = pane.size.layers * pane.size.heads;
  pane.cellOf.forEach((cell, key) => {
    const bin = recorded.bin(pane.pattern, step, key);
    const score = exact.get(key);
    const masked = recorded.isMasked(step, key);
    const text = visible(recorded.text(step, key));
    const { ground, ink } = bin ? pane.look.colours(score ?? middle(bin)) : { ground: "transparent", ink: "inherit" };
    cell.style.backgroundColor = ground;
    cell.style.color = ink;
    cell.classList.toggle("undefined", !bin);
    cell.classList.toggle("masked", masked);
    cell.classList.toggle("sink", sinks.has(key));
    cell.classList.toggle("written", recorded.isWritten(step, key));
    cell.classList.toggle("revised", recorded.isRevised(step, key));
    cell.classList.toggle("differs", Boolean(other) && differs(pane, other, key));
    cell.firstChild.textContent = masked && recorded.about.open !== "open" ? "\u00a0\u00a0" : cut(recorded.text(step, key));
    cell.dataset.key = key;
    const count = pane.heads.get(key) ?? 0;
    const what = masked ? maskText(pane, key) : text;
    cell.title = [
      `${recorded.about.positions[key] < 0 ? "learned" : "position"} ${recorded.place(key)}: ${what}`,
      `score ${score !== undefined ? score.toFixed(3) : bin ? `from ${number(bin[0])} to ${number(bin[1])}` : "undefined"}`,
      `sink in ${count} of ${patterns} at this step`,
      ...(recorded.isRevised(step, key) ? [revisionText(recorded, step, key)] : []),
    ].join("\n");
    if (masked) cell.setAttribute("aria-label", `${recorded.about.open}, position ${recorded.place(key)}`);
    else cell.removeAttribute("aria-label");
  });
}

function revisionText(recorded, step, key) {
  const next = recorded.after(step, key);
  if (next === undefined) return "deleted at this step";
  if (recorded.isMasked(step + 1, next)) return `${recorded.about.open} again at this step`;
  return `rewritten at this step: "${visible(recorded.text(step + 1, next))}"`;
}

// In a model of uniform noise an open position holds a random token.
function openText(recorded, step, key) {
  const { open } = recorded.about;
  return open === "open" ? `open, holds "${visible(recorded.text(step, key))}"` : open;
}

// A part of a run may leave out the step that decided a position which is open at one of its steps, but not at the next.
function decodedAt(recorded, step, key) {
  const { steps } = recorded.about;
  if (recorded.isWritten(step, key)) return `at step ${steps[step]}`;
  return step + 1 < steps.length ? `between step ${steps[step]} and ${steps[step + 1]}` : `after step ${steps[step]}`;
}

function maskText(pane, key) {
  const { recorded, step } = pane;
  for (let later = step, place = key; later < recorded.steps; later += 1) {
    const next = recorded.after(later, place);
    if (next === undefined) return openText(recorded, step, key); // deleted, one of two masks, or room for masks
    if (!recorded.isMasked(later + 1, next)) {
      return `${openText(recorded, step, key)}, decoded ${decodedAt(recorded, later, place)}: "${visible(recorded.text(later + 1, next))}"`;
    }
    place = next;
  }
  return `${openText(recorded, step, key)} to the end`;
}

// Whether two panes show different tokens at the same position.
function differs(pane, other, key) {
  const [a, b] = [pane, other];
  if (a.recorded.about.positions.length !== b.recorded.about.positions.length) return false;
  if (a.recorded.about.positions[key] !== b.recorded.about.positions[key]) return false;
  if (a.recorded.isMasked(a.step, key) || b.recorded.isMasked(b.step, key)) return false;
  return a.recorded.text(a.step, key) !== b.recorded.text(b.step, key);
}
