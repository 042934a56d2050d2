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
