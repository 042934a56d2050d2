// A page: panes that show recordings at one step, one pattern and one rule, and the controls of these.

const PAUSE = 450;

// The step of another recording that is linked to a step of the first one: the same index, or the nearest progress.
function linkedStep(first, other, step, link) {
  if (link === "step") return Math.min(step, other.steps - 1);
  const wanted = first.about.progress[step];
  let best = 0;
  for (let at = 1; at < other.steps; at += 1) {
    const [now, then] = [at, best].map((i) => Math.abs(other.about.progress[i] - wanted));
    if (now < then) best = at;
  }
  return best;
}

class Page {
  // `root` holds the controls: the document, or a shadow root; `host` is the element with the theme.
  constructor(root, host) {
    Object.assign(this, { root, look: new Look(host), panes: [] });
    this.state = { step: 0, layer: 0, head: 0, level: "head", rule: null, link: "progress", timer: null };
  }

  control(id) {
    return this.root.getElementById(id);
  }

  // Show these recordings side by side. Later ones are linked to the first.
  take(recordings, labels) {
    this.look.highest = Math.max(4, ...recordings.map((recorded) => recorded.about.highest));
    const alone = recordings.length < 2;
    this.panes = recordings.map((recorded, i) => new Pane(this, recorded, labels[i], { alone }));
    this.control("panes").replaceChildren(...this.panes.map((pane) => pane.root));
    this.control("panes").classList.toggle("compared", !alone);
    this.control("step").max = recordings[0].steps - 1;
    this.state.step = Math.min(this.state.step, recordings[0].steps - 1);
  }

  // The step of each pane.
  steps() {
    const [first] = this.panes;
    const { step, link } = this.state;
    return this.panes.map((pane) => (pane === first ? step : linkedStep(first.recorded, pane.recorded, step, link)));
  }

  paint() {
    const { state, panes } = this;
    const steps = this.steps();
    const ready = panes.map((pane, i) => pane.recorded.ready(state, steps[i], this)).every(Boolean);
    if (ready) for (const pane of panes) pane.measure();
    this.control("step").value = state.step;
    this.control("step").setAttribute("aria-valuetext", this.whereText());
    this.control("where").textContent = this.whereText();
    if (!ready) return;
    panes.forEach((pane, i) => pane.take(state, steps[i]));
    panes.forEach((pane, i) => pane.paint(state, panes[1 - i]));
    this.control("limit").textContent = limitText(panes, state.rule, state.level);
  }

  whereText() {
    const { about, steps } = this.panes[0].recorded;
    const { step } = this.state;
    return `step ${about.steps[step]} of ${about.steps[0]} to ${about.steps[steps - 1]}` +
      `${Math.max(...about.blocks) > 0 ? `, block ${about.blocks[step]}` : ""}, ${Math.round(100 * about.progress[step])}% decoded`;
  }

  say(text) {
    this.control("said").textContent = text;
  }

  goStep(step) {
    this.state.step = Math.min(Math.max(step, 0), this.panes[0].recorded.steps - 1);
    this.paint();
  }

  // For a step of the second recording, the step of the first one that is linked to it.
  goTo(pane, step) {
    const [first] = this.panes;
    this.goStep(pane === first ? step : linkedStep(pane.recorded, first.recorded, step, this.state.link));
  }

  choose(layer, head) {
    Object.assign(this.state, { layer, head });
    this.paint();
  }

  play(on) {
    clearInterval(this.state.timer);
    this.state.timer = null;
    const last = this.panes[0].recorded.steps - 1;
    if (on) {
      if (this.state.step === last) this.goStep(0);
      this.state.timer = setInterval(() => {
        if (this.state.step >= last) this.play(false);
        else this.goStep(this.state.step + 1);
      }, PAUSE);
    }
    this.control("play").textContent = on ? "Pause" : "Play";
    this.control("play").setAttribute("aria-pressed", String(on));
  }

  // A rule whose sinks are stored has no setting: its value is null.
  takeStoredRule(name) {
    this.state.rule = { name, value: null };
    this.control("rule").value = name;
    for (const id of ["setting", "value", "fine"]) this.control(id).parentElement.hidden = true;
    this.paint();
  }

  takeRule(name, value) {
    if (!(name in RULES)) {
      this.takeStoredRule(name);
      return;
    }
    const control = (id) => this.control(id);
    for (const id of ["setting", "value", "fine"]) control(id).parentElement.hidden = false;
    const whole = name === "top-k";
    const most = whole ? Math.max(...this.panes.map((pane) => pane.recorded.keys)) : Infinity;
    const safe = Number.isFinite(value) ? value : RULES[name].start;
    const rule = { name, value: whole ? Math.min(Math.max(Math.round(safe), 1), most) : Math.max(safe, name === "soft-sigmoid" ? 0.05 : 0) };
    this.state.rule = rule;
    const range = [RULES[name].range[0], Math.min(most, RULES[name].range[1])];
    for (const id of ["value", "fine"]) {
      control(id).step = whole ? 1 : id === "value" ? "any" : 0.05;
      control(id).min = id === "fine" ? range[0] : whole ? 1 : 0;
    }
    control("fine").max = Math.max(range[1], rule.value);
    control("rule").value = name;
    control("setting").textContent = RULES[name].setting;
    control("fine").value = rule.value;
    if (this.root.activeElement !== control("value") || Number(control("value").value) !== rule.value) {
      control("value").value = rule.value;
    }
    this.paint();
  }

  takeTheme(name) {
    this.look.take(name);
  }

  // The computed rules, and the stored ones with these names.
  listRules(stored) {
    const options = Object.entries(RULES).map(([name, { label }]) => new Option(label, name));
    this.control("rule").replaceChildren(...options, ...stored.map((name) => new Option(name, name)));
  }

  // The levels that all recordings have.
  listLevels(recordings) {
    const names = recordings.map((recorded) => recorded.about.levels.map((level) => level.name));
    const shared = names[0].filter((name) => names.every((others) => others.includes(name)));
    if (!shared.length) throw new Error("the two recordings have no level in common");
    const labels = { head: "every head", layer: "layer mean", model: "model mean" };
    this.control("level").replaceChildren(...shared.map((name) => new Option(labels[name], name)));
    [this.state.level] = shared;
  }

  keyed(event) {
    const { target, key } = event;
    const typing = target.matches("select, input[type=number], input[type=text]");
    if (typing || event.altKey || event.ctrlKey || event.metaKey) return;
    const { step, timer } = this.state;
    const last = this.panes[0].recorded.steps - 1;
    const steps = { ArrowLeft: step - 1, ArrowRight: step + 1, Home: 0, End: last };
    if (key in steps && !target.matches("input")) {
      event.preventDefault();
      this.goStep(steps[key]);
    } else if (key === " " && !target.matches("button, summary")) {
      event.preventDefault();
      this.play(timer === null);
    }
  }

  listen() {
    const on = (id, kind, act) => this.control(id).addEventListener(kind, (event) => act(event.target.value));
    on("step", "input", (value) => this.goStep(Number(value)));
    on("back", "click", () => this.goStep(this.state.step - 1));
    on("forward", "click", () => this.goStep(this.state.step + 1));
    on("play", "click", () => this.play(this.state.timer === null));
    on("rule", "change", (value) => this.takeRule(value, RULES[value]?.start ?? null));
    for (const id of ["value", "fine"]) {
      on(id, "input", (value) => {
        if (value !== "") this.takeRule(this.state.rule.name, Number(value));
      });
    }
    on("level", "change", (value) => {
      this.state.level = value;
      this.paint();
    });
    on("link", "change", (value) => {
      this.state.link = value;
      this.paint();
    });
    this.root.addEventListener("keydown", (event) => this.keyed(event));
    const panes = this.control("panes");
    let width = panes.clientWidth;
    this.resized = new ResizeObserver(() => {
      if (panes.clientWidth === width) return;
      width = panes.clientWidth;
      this.paint();
    });
    this.resized.observe(panes);
  }

  // Stop what goes on by itself.
  leave() {
    this.play(false);
    this.resized?.disconnect();
  }
}
