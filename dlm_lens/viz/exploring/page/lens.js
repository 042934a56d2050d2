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
