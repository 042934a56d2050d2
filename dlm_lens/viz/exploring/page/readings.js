// The logit lens of a position: the likeliest tokens of every layer.

function paintLens(pane, { layers, tokens, probabilities, entropy, rank, predicts, predicted, written }) {
  const find = (name) => pane.root.querySelector(name);
  const table = find("table.lens");
  header(table, ["layer", "likeliest tokens and their probabilities", "entropy (nats)", "rank of the final token"]);
  table.tBodies[0].replaceChildren(...layers.map((layer, i) => {
    const cell = document.createElement("td");
    tokens[i].forEach((text, k) => {
      const one = make("span", "reading");
      one.append(token(text, 16), make("span", "share", ` ${(100 * probabilities[i][k]).toFixed(1)}%`));
      one.dataset.exact = String(probabilities[i][k]);
      cell.append(one, " ");
    });
    return row(String(layer), cell, scored(entropy[i]), rank[i] < 0 ? "\u2013" : String(rank[i]));
  }));
  const note = find(".lensnote");
  if (!layers.length) note.textContent = "This step does not compute the position.";
  else if (predicts === null) note.textContent = "The state here predicts no position.";
  else {
    note.replaceChildren(
      `Each layer's output read as a prediction of position ${predicts}; ` +
        (predicted ? "finally " : "the training loss does not cover it at this step; finally "),
      ...(written ? ['"', token(written, 24), '".'] : ["open."]),
    );
  }
}

// The attention pattern of a head: queries from top to bottom, keys from left to right.

function paintPattern(pane, shown) {
  const canvas = pane.root.querySelector("canvas.pattern");
  const { queries, keys, values, largest } = shown;
  const room = Math.max(160, canvas.parentElement.clientWidth - 2);
  const side = Math.max(1, Math.min(14, room / keys, 640 / queries));
  const image = document.createElement("canvas");
  [image.width, image.height] = [keys, queries];
  const dots = image.getContext("2d").createImageData(keys, queries);
  for (let i = 0; i < values.length; i += 1) dots.data.set([...mix(pane.look.ramp, values[i] / largest), 255], 4 * i);
  image.getContext("2d").putImageData(dots, 0, 0);
  const pen = sized(canvas, side * keys, side * queries);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image, 0, 0, side * keys, side * queries);
  shown.side = side;
  if (shown.pair) {
    const [query, key] = shown.pair;
    pen.lineWidth = 2;
    pen.strokeStyle = pane.look.css("--mark");
    pen.strokeRect(key * side - 1, query * side - 1, side + 2, side + 2);
  }
  const text = pairText(pane, shown);
  pane.root.querySelector(".pair").replaceChildren(...text);
  canvas.setAttribute("aria-label", pane.root.querySelector(".pair").textContent);
}

// No pattern, and why.
function clearPattern(pane, reason) {
  const canvas = pane.root.querySelector("canvas.pattern");
  sized(canvas, 0, 0);
  canvas.setAttribute("aria-label", reason);
  pane.root.querySelector(".pair").textContent = reason;
}

function pairText(pane, { pair, queries, keys, values, largest }) {
  if (!pair) return [`${queries} queries, ${keys} keys; the darkest is ${number(largest)}. Point at an entry, or use the arrow keys.`];
  const [query, key] = pair;
  const value = values[query * keys + key];
  const { recorded } = pane;
  return [`query ${recorded.place(query)} ("`, tokenAt(pane, query), `") attends to key ${recorded.place(key)} ("`, tokenAt(pane, key), `"): ${value.toFixed(4)}`];
}

function listenPattern(pane) {
  const canvas = pane.root.querySelector("canvas.pattern");
  const move = (query, key) => {
    const { shownPattern: shown } = pane;
    if (!shown) return;
    shown.pair = [Math.min(Math.max(query, 0), shown.queries - 1), Math.min(Math.max(key, 0), shown.keys - 1)];
    paintPattern(pane, shown);
  };
  canvas.addEventListener("pointermove", (event) => {
    const side = pane.shownPattern?.side ?? 1;
    move(Math.floor(event.offsetY / side), Math.floor(event.offsetX / side));
  });
  canvas.addEventListener("click", () => {
    if (pane.shownPattern?.pair) pane.page.pick(pane.shownPattern.pair[1]);
  });
  canvas.addEventListener("keydown", (event) => {
    const [query, key] = pane.shownPattern?.pair ?? [0, 0];
    const moves = { ArrowUp: [query - 1, key], ArrowDown: [query + 1, key], ArrowLeft: [query, key - 1], ArrowRight: [query, key + 1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    move(...moves[event.key]);
    pane.page.say(canvas.getAttribute("aria-label"));
  });
}
