// The data of the page: from text or bytes to typed arrays, and the recording that they describe.

const TYPES = { f8: Float64Array, f4: Float32Array, f2: Uint16Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromHalf(half) {
  const values = new Float32Array(half.length);
  for (let i = 0; i < half.length; i += 1) {
    const [exponent, fraction] = [(half[i] >> 10) & 31, half[i] & 1023];
    const size = exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
    values[i] = half[i] & 0x8000 ? -size : size;
  }
  return values;
}

// An array of a file is text (deflated planes of bytes, in base64); one of the kernel is its bytes as they are.
async function unpacked(part) {
  const type = TYPES[part.dtype];
  if (typeof part.data !== "string") {
    const { buffer, byteOffset, byteLength } = part.data;
    const plain = new type(buffer.slice(byteOffset, byteOffset + byteLength));
    return part.dtype === "f2" ? fromHalf(plain) : plain;
  }
  const planes = await inflate(bytesOf(part.data));
  const width = type.BYTES_PER_ELEMENT;
  const count = planes.length / width;
  let bytes = planes;
  if (width > 1) {
    bytes = new Uint8Array(planes.length);
    for (let b = 0; b < width; b += 1) {
      for (let i = 0, at = b; i < count; i += 1, at += width) bytes[at] = planes[b * count + i];
    }
  }
  const values = new type(bytes.buffer);
  return part.dtype === "f2" ? fromHalf(values) : values;
}

// Where the entries of each (pattern, step) begin, from their counts.
function offsetsOf(count) {
  const offsets = new Uint32Array(count.length + 1);
  for (let i = 0; i < count.length; i += 1) offsets[i + 1] = offsets[i] + count[i];
  return offsets;
}

// The sinks by one rule, as find_sinks found them when the report was written.
class StoredRule {
  static async from(data, steps) {
    const rule = new StoredRule();
    Object.assign(rule, { name: data.name, formula: data.formula, levels: data.levels, scale: data.scale, low: data.low, steps });
    const parts = ["count", "key", "score", "threshold"];
    const arrays = await Promise.all(parts.map((part) => unpacked(data[part])));
    parts.forEach((part, i) => { rule[part] = arrays[i]; });
    rule.offsets = offsetsOf(rule.count);
    return rule;
  }

  at(pattern, step) {
    const place = pattern * this.steps + step;
    const found = [];
    for (let i = this.offsets[place]; i < this.offsets[place + 1]; i += 1) {
      found.push({ key: this.key[i], score: this.score[i], threshold: this.threshold[i] });
    }
    return found;
  }
}

async function takeArrays(target, parts) {
  const names = Object.keys(parts);
  const arrays = await Promise.all(names.map((name) => unpacked(parts[name])));
  names.forEach((name, i) => { target[name] = arrays[i]; });
}

// The scores of some patterns at some steps: the strongest exactly, of the others the bin of their colour.
class Scores {
  static async from(data, steps, keys) {
    const given = new Scores();
    await takeArrays(given, { ...data.statistics, ...data.strongest, bins: data.bins });
    Object.assign(given, { steps, keys, exact: data.exact, edges: data.edges, offsets: offsetsOf(given.count) });
    const rules = await Promise.all(data.stored.map((rule) => StoredRule.from(rule, steps)));
    given.stored = new Map(rules.map((rule) => [rule.name, rule]));
    return given;
  }

  // The exactly known keys of a pattern at a step, highest first.
  strongest(pattern, step) {
    const place = pattern * this.steps + step;
    const found = [];
    for (let i = this.offsets[place]; i < this.offsets[place + 1]; i += 1) {
      found.push({ key: this.key[i], score: this.score[i] });
    }
    return found;
  }

  summary(pattern, step) {
    const place = pattern * this.steps + step;
    return { total: this.total[place], defined: this.defined[place], std: this.std[place] };
  }

  bin(pattern, step, key, highest) {
    const code = this.bins[(pattern * this.keys + key) * this.steps + step];
    const { edges } = this;
    return code ? [code > 1 ? edges[code - 2] : 0, code <= edges.length ? edges[code - 1] : highest] : null;
  }
}

// One recording. A pattern is a head of a layer, the mean of a layer's heads, or the mean of all.
class Recorded {
  static async from(data) {
    const given = await new this().take(data);
    given.scores = await Scores.from(data, given.steps, given.keys);
    return given;
  }

  // Everything but the scores.
  async take(data) {
    const parts = { tokens: data.tokens, masked: data.masked, written: data.written };
    if (data.revised) parts.revised = data.revised;
    if (data.moved) parts.moved = data.moved;
    await takeArrays(this, parts);
    Object.assign(this, { about: data, steps: data.steps.length, keys: data.positions.length, texts: data.texts });
    return this;
  }

  // The scores that hold a pattern at a step, and its place there; null while they are not known.
  at(pattern, step) {
    return { scores: this.scores, pattern, step };
  }

  // Whether the scores that the page shows at a step are known; if not, the page paints again when they are.
  ready() {
    return true;
  }

  // Changes when more scores of a pattern become known; "all" when those of every step are.
  known() {
    return "all";
  }

  // How exactly the scores at a step are known.
  exactAt() {
    return this.scores.exact;
  }

  exactText() {
    return exactText(this);
  }

  // The rules whose sinks were found beforehand: name -> what it says about itself.
  get stored() {
    return this.scores.stored;
  }

  level(name) {
    return this.about.levels.find((level) => level.name === name);
  }

  // Index of a pattern, from the places of layer and head on their axes, as far as the level has these axes.
  pattern(name, layer, head) {
    const { first, layers, heads } = this.level(name);
    return first + Math.min(layer, layers - 1) * heads + Math.min(head, heads - 1);
  }

  // The exactly known keys of a pattern at a step, highest first.
  strongest(pattern, step) {
    const at = this.at(pattern, step);
    return at ? at.scores.strongest(at.pattern, at.step) : [];
  }

  // Number, sum and standard deviation of the scores of a pattern at a step.
  summary(pattern, step) {
    const at = this.at(pattern, step);
    return at ? at.scores.summary(at.pattern, at.step) : { total: NaN, defined: 0, std: NaN };
  }

  // The sinks of a pattern at a step by a stored rule.
  storedSinks(name, pattern, step) {
    const at = this.at(pattern, step);
    return at ? at.scores.stored.get(name).at(at.pattern, at.step) : [];
  }

  // The borders of the bin of a score: [low, high]; null where the score is undefined.
  bin(pattern, step, key) {
    const at = this.at(pattern, step);
    return at ? at.scores.bin(at.pattern, at.step, key, this.about.highest) : null;
  }

  text(step, key) {
    return this.texts[this.tokens[step * this.keys + key]];
  }

  id(step, key) {
    return this.about.ids[this.tokens[step * this.keys + key]];
  }

  isMasked(step, key) {
    return this.masked[step * this.keys + key] === 1;
  }

  isWritten(step, key) {
    return this.written[step * this.keys + key] === 1;
  }

  // Whether the step rewrote a token that was decided before; only samplers that edit do.
  isRevised(step, key) {
    return Boolean(this.revised) && this.revised[step * this.keys + key] === 1;
  }

  // The key that has after a step what a key has at it; undefined where nothing has it, or several keys.
  after(step, key) {
    const next = this.moved ? this.moved[step * this.keys + key] : key;
    return next < this.keys ? next : undefined;
  }

  // A label of a key: its position from the prompt's first token, or sink(i) for a learned sink token.
  place(key) {
    const position = this.about.positions[key];
    return position < 0 ? `sink(${-1 - position})` : String(position);
  }
}
