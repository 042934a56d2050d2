// The page: its state, its controls, and how two recordings are linked.

const PAUSE = 450;

const control = (id) => document.getElementById(id);
const state = { step: 0, layer: 0, head: 0, level: "head", rule: null, link: "progress", timer: null };
let panes = [];

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

function paint() {
  const first = panes[0].recorded;
  for (const pane of panes) {
    pane.take(state, pane === panes[0] ? state.step : linkedStep(first, pane.recorded, state.step, state.link));
  }
  panes.forEach((pane, i) => pane.paint(state, panes[1 - i]));
  control("step").value = state.step;
  control("step").setAttribute("aria-valuetext", whereText());
  control("where").textContent = whereText();
  control("limit").textContent = limitText(panes.map((pane) => pane.recorded), state.rule, state.level);
}

function whereText() {
  const { about, steps } = panes[0].recorded;
  const block = about.blocks[state.step];
  return `step ${about.steps[state.step]} of ${about.steps[0]} to ${about.steps[steps - 1]}` +
    `${Math.max(...about.blocks) > 0 ? `, block ${block}` : ""}, ${Math.round(100 * about.progress[state.step])}% decoded`;
}

function goStep(step) {
  state.step = Math.min(Math.max(step, 0), panes[0].recorded.steps - 1);
  paint();
}

const actions = {
  paint,
  say: (text) => { control("said").textContent = text; },
  choose: (layer, head) => {
    Object.assign(state, { layer, head });
    paint();
  },
  // For a step of the second recording, the step of the first one that is linked to it.
  goTo: (pane, step) => {
    const first = panes[0].recorded;
    goStep(pane === panes[0] ? step : linkedStep(pane.recorded, first, step, state.link));
  },
};

function play(on) {
  clearInterval(state.timer);
  state.timer = null;
  const last = panes[0].recorded.steps - 1;
  if (on) {
    if (state.step === last) goStep(0);
    state.timer = setInterval(() => {
      if (state.step >= last) play(false);
      else goStep(state.step + 1);
    }, PAUSE);
  }
  control("play").textContent = on ? "Pause" : "Play";
  control("play").setAttribute("aria-pressed", String(on));
}

// A rule whose sinks are stored has no setting: its value is null.
function takeStoredRule(name) {
  state.rule = { name, value: null };
  control("rule").value = name;
  for (const id of ["setting", "value", "fine"]) control(id).parentElement.hidden = true;
  paint();
}

function takeRule(name, value) {
  if (!(name in RULES)) {
    takeStoredRule(name);
    return;
  }
  for (const id of ["setting", "value", "fine"]) control(id).parentElement.hidden = false;
  const whole = name === "top-k";
  const most = whole ? Math.max(...panes.map((pane) => pane.recorded.keys)) : Infinity;
  const safe = Number.isFinite(value) ? value : RULES[name].start;
  state.rule = { name, value: whole ? Math.min(Math.max(Math.round(safe), 1), most) : Math.max(safe, name === "soft-sigmoid" ? 0.05 : 0) };
  const range = [RULES[name].range[0], Math.min(most, RULES[name].range[1])];
  for (const id of ["value", "fine"]) {
    control(id).step = whole ? 1 : id === "value" ? "any" : 0.05;
    control(id).min = id === "fine" ? range[0] : whole ? 1 : 0;
  }
  control("fine").max = Math.max(range[1], state.rule.value);
  control("rule").value = name;
  control("setting").textContent = RULES[name].setting;
  control("fine").value = state.rule.value;
  if (document.activeElement !== control("value") || Number(control("value").value) !== state.rule.value) {
    control("value").value = state.rule.value;
  }
  paint();
}

function takeTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name;
}

function keyed(event) {
  const { target, key } = event;
  const typing = target.matches("select, input[type=number]");
  if (typing || event.altKey || event.ctrlKey || event.metaKey) return;
  const last = panes[0].recorded.steps - 1;
  const steps = { ArrowLeft: state.step - 1, ArrowRight: state.step + 1, Home: 0, End: last };
  if (key in steps && !target.matches("input")) {
    event.preventDefault();
    goStep(steps[key]);
  } else if (key === " " && !target.matches("button, summary")) {
    event.preventDefault();
    play(state.timer === null);
  }
}

function listen() {
  control("step").addEventListener("input", (event) => goStep(Number(event.target.value)));
  control("back").addEventListener("click", () => goStep(state.step - 1));
  control("forward").addEventListener("click", () => goStep(state.step + 1));
  control("play").addEventListener("click", () => play(state.timer === null));
  control("rule").addEventListener("change", (event) => takeRule(event.target.value, RULES[event.target.value]?.start ?? null));
  for (const id of ["value", "fine"]) {
    control(id).addEventListener("input", (event) => {
      if (event.target.value !== "") takeRule(state.rule.name, Number(event.target.value));
    });
  }
  control("level").addEventListener("change", (event) => {
    state.level = event.target.value;
    paint();
  });
  control("link").addEventListener("change", (event) => {
    state.link = event.target.value;
    paint();
  });
  control("theme").addEventListener("click", () => {
    takeTheme(theme === "light" ? "dark" : "light");
    paint();
  });
  document.addEventListener("keydown", keyed);
  let width = control("panes").clientWidth;
  new ResizeObserver(() => {
    if (control("panes").clientWidth === width) return;
    width = control("panes").clientWidth;
    paint();
  }).observe(control("panes"));
}

// The pattern with which the page starts: the one with the highest score at any step.
function strongestPattern(recorded) {
  const { name, layers, heads } = recorded.about.levels[0];
  let best = [-1, 0, 0];
  for (let layer = 0; layer < layers; layer += 1) {
    for (let head = 0; head < heads; head += 1) {
      for (let step = 0; step < recorded.steps; step += 1) {
        const score = recorded.strongest(recorded.pattern(name, layer, head), step)[0]?.score ?? -1;
        if (score > best[0]) best = [score, layer, head];
      }
    }
  }
  return best.slice(1);
}

// Show a prompt of the recording, or of both, in place of the current one.
async function show(data, index) {
  const recordings = await Promise.all(data.prompts[index].map((given) => Recorded.from(given)));
  highest = Math.max(4, ...recordings.map((recorded) => recorded.about.highest));
  panes = recordings.map((recorded, i) => new Pane(recorded, data.recordings[i].label, { ...actions, alone: recordings.length < 2 }));
  control("panes").replaceChildren(...panes.map((pane) => pane.root));
  control("panes").classList.toggle("compared", panes.length > 1);
  control("prompted").textContent = `prompt ${index + 1} of ${data.prompts.length}` +
    (recordings[0].about.rows > data.prompts.length ? ` (the recording has ${recordings[0].about.rows})` : "");
  control("step").max = recordings[0].steps - 1;
  state.step = Math.min(state.step, recordings[0].steps - 1);
  // For the console and for tests.
  window.dlmLens = { state, panes, sinksAt };
  return recordings;
}

// The computed rules, and the stored ones that every recording of the file has.
function listRules(data) {
  const all = data.prompts.flat().map((given) => given.stored.map((rule) => rule.name));
  const stored = all[0].filter((name) => all.every((names) => names.includes(name)));
  const options = Object.entries(RULES).map(([name, { label }]) => new Option(label, name));
  control("rule").append(...options, ...stored.map((name) => new Option(name, name)));
}

function listPrompts(data) {
  control("prompts").hidden = data.prompts.length < 2;
  control("prompt").append(...data.prompts.map(([first], i) => new Option(`row ${first.row}: ${visible(first.prompt_text)}`, i)));
  control("prompt").addEventListener("change", async (event) => {
    play(false);
    await show(data, Number(event.target.value));
    paint();
    document.documentElement.dataset.prompt = event.target.value;
  });
}

async function start() {
  const data = JSON.parse(control("data").textContent);
  data.prompts = [data.recordings, ...(data.others ?? [])];
  takeTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  control("title").append(make("bdi", "", data.title || "Attention sinks"));
  const recordings = await show(data, 0);
  listPrompts(data);
  listRules(data);
  const names = recordings.map((recorded) => recorded.about.levels.map((level) => level.name));
  const shared = names[0].filter((name) => names.every((others) => others.includes(name)));
  if (!shared.length) throw new Error("the two recordings have no level in common");
  control("level").append(...shared.map((name) => new Option({ head: "every head", layer: "layer mean", model: "model mean" }[name], name)));
  state.level = shared[0];
  [state.layer, state.head] = strongestPattern(recordings[0]);
  state.link = new Set(recordings.map((recorded) => recorded.steps)).size > 1 ? "progress" : "step";
  control("link").value = state.link;
  control("linking").hidden = panes.length < 2;
  listen();
  takeRule(data.rule.name, data.rule.value);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {
  control("problem").textContent = `This report cannot be shown: ${error.message}`;
  control("problem").hidden = false;
  throw error;
});
