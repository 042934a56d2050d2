// Text of the page. Tokens are untrusted: they are inserted as text only, each in a direction of its own.

const CELL = 14;

// Invisible characters, and those that change the direction of text, which are written as their codes. Texts in the file
// have none (token_text.shown); this is a second line of defence.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

function visible(text) {
  const escaped = text.replace(HIDDEN, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
  return escaped || "\u2205";
}

function cut(text, length = CELL) {
  const letters = Array.from(visible(text));
  return letters.length > length ? `${letters.slice(0, length - 1).join("")}\u2026` : letters.join("");
}

function make(tag, kind = "", text = "") {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== "") element.textContent = text;
  return element;
}

function token(text, length) {
  const element = make("bdi", "token", cut(text, length));
  element.title = visible(text);
  return element;
}

// "1 sink", "2 sinks".
function counted(count, name) {
  return `${count} ${name}${count === 1 ? "" : "s"}`;
}

function number(value) {
  if (Number.isNaN(value)) return "\u2013";
  return Math.abs(value) >= 1000 ? value.toPrecision(6) : value.toFixed(3).replace(/\.?0+$/, "");
}

// A cell with a score: rounded in its text, exact in its data attribute.
function scored(value) {
  const cell = make("td", "number", Number.isNaN(value) ? "\u2013" : value.toFixed(3));
  if (!Number.isNaN(value)) cell.dataset.exact = String(value);
  return cell;
}

function row(...cells) {
  const line = document.createElement("tr");
  line.append(...cells.map((cell) => (cell instanceof Node && cell.tagName === "TD" ? cell : wrapped(cell))));
  return line;
}

function wrapped(content) {
  const cell = document.createElement("td");
  cell.append(content instanceof Node ? content : String(content));
  return cell;
}

function header(table, names) {
  const line = document.createElement("tr");
  for (const name of names) {
    const cell = make("th", "", name);
    cell.scope = "col";
    line.append(cell);
  }
  table.tHead.replaceChildren(line);
}
