// Requests to the kernel and their answers.

// A message with its buffers in the places of {"buffer": i}.
function joined(value, buffers) {
  if (Array.isArray(value)) return value.length && typeof value[0] === "object" ? value.map((one) => joined(one, buffers)) : value;
  if (value === null || typeof value !== "object") return value;
  if (typeof value.buffer === "number") return buffers[value.buffer];
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, joined(one, buffers)]));
}

const SLOW = 4000; // milliseconds without an answer, after which the page says that it waits

class Kernel {
  // `slow` is called with true when an answer takes long, and with false when all have come.
  constructor(model, slow) {
    Object.assign(this, { model, slow, count: 0, name: Math.random().toString(36).slice(2), waiting: new Map() });
    this.hear = (message, buffers) => this.heard(message, buffers);
    model.on("msg:custom", this.hear);
  }

  // The answer to a request; null if it was about a run that is no longer shown.
  ask(request) {
    this.count += 1;
    const id = `${this.name}-${this.count}`;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.model.send({ ...request, id });
      setTimeout(() => this.waiting.has(id) && this.slow(true), SLOW);
    });
  }

  heard(message, buffers) {
    const waiting = this.waiting.get(message?.id);
    if (!waiting) return;
    this.waiting.delete(message.id);
    if (!this.waiting.size) this.slow(false);
    if (message.problem !== undefined) waiting.reject(new Error(message.problem));
    else waiting.resolve(message.stale ? null : joined(message, buffers));
  }

  leave() {
    this.model.off("msg:custom", this.hear);
    this.waiting.clear();
  }
}

// A recording in a kernel, which sends the scores of a step, or of a pattern, when the page shows them.

const AHEAD = 8; // steps to each side that are fetched before they are shown
const MOST_BYTES = 2 ** 27;

class Live extends Recorded {
  static async from(kernel, side, version, content) {
    const given = await new Live().take(content);
    Object.assign(given, { kernel, side, version, known_steps: new Map(), paths: new Map(), busy: false, asking: null });
    Object.assign(given, { wanted: 0, wantedPath: null, page: null, failed: false, bytes: 0 });
    await given.keep(0, content.first_step);
    [given.first] = given.known_steps.values();
    return given;
  }

  async keep(step, answer) {
    const scores = await Scores.from(answer, 1, this.keys);
    this.known_steps.set(step, scores);
    this.bytes += scores.bins.length + 6 * scores.key.length;
    while (this.bytes > MOST_BYTES && this.known_steps.size > 2 * AHEAD) this.forget();
  }

  // Forget the step that is farthest from the one that is shown.
  forget() {
    const [far] = [...this.known_steps.keys()].sort((a, b) => Math.abs(b - this.wanted) - Math.abs(a - this.wanted));
    const scores = this.known_steps.get(far);
    this.bytes -= scores.bins.length + 6 * scores.key.length;
    this.known_steps.delete(far);
  }

  at(pattern, step) {
    const scores = this.known_steps.get(step);
    if (scores) return { scores, pattern, step: 0 };
    const path = this.paths.get(pattern);
    return path ? { scores: path, pattern: 0, step } : null;
  }

  ready(state, step, page) {
    this.page = page;
    this.wanted = step;
    this.failed = false;
    this.fetchStep();
    const { layers, heads } = this.level(state.level);
    const place = [Math.min(state.layer, layers - 1), Math.min(state.head, heads - 1)];
    this.wantedPath = this.pattern(state.level, ...place);
    this.fetchPath(state.level, this.wantedPath, place);
    return this.known_steps.has(step);
  }

  known(pattern) {
    return this.paths.has(pattern) || this.known_steps.size === this.steps ? "all" : `${this.known_steps.size}`;
  }

  exactAt(step) {
    return (this.known_steps.get(step) ?? this.first).exact;
  }

  exactText() {
    return "The kernel sends the scores of a step when the page shows it: exactly those of the strongest keys of every " +
      "pattern, and every number in a table is one of them; of the others the bin of their colour. explorer.received has all.";
  }

  get stored() {
    return this.first.stored;
  }

  // The step that is shown, then its neighbours.
  nextStep() {
    for (let far = 0; far <= AHEAD; far += 1) {
      for (const step of [this.wanted + far, this.wanted - far]) {
        if (step >= 0 && step < this.steps && !this.known_steps.has(step)) return step;
      }
    }
    return null;
  }

  async fetchStep() {
    const step = this.busy || this.failed ? null : this.nextStep();
    if (step === null) return;
    this.busy = true;
    try {
      const answer = await this.kernel.ask({ kind: "step", side: this.side, version: this.version, step });
      if (answer) await this.keep(step, answer);
      else this.failed = true;
    } catch {
      this.failed = true; // the kernel says why
    }
    this.busy = false;
    if (step === this.wanted && !this.failed) this.page.paint();
    else this.fetchStep();
  }

  async fetchPath(level, pattern, [layer, head]) {
    if (this.asking !== null || this.paths.has(pattern)) return;
    this.asking = pattern;
    try {
      const answer = await this.kernel.ask({ kind: "path", side: this.side, version: this.version, level, layer, head });
      if (answer) this.paths.set(pattern, await Scores.from(answer, this.steps, this.keys));
    } catch {
      // The kernel says why.
    }
    this.asking = null;
    // What failed is asked for when the page paints again; painting here would ask without end.
    if (this.paths.has(pattern) || this.wantedPath !== pattern) this.page.paint();
  }
}
