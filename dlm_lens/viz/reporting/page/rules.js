// The detectors. Those of RULES are computed here, number for number as in dlm_lens.sinks: float64 arithmetic, a float32
// threshold. Sinks by other rules are stored in the file, as find_sinks found them (Recorded.stored).

const STEEPNESS = 2; // SoftSigmoid's default k, in standard deviations

const RULES = {
  "above-mean": {
    label: "mean of the others + eps", setting: "eps", start: 3, range: [0, 20],
    formula: (v) => `AboveMean(eps=${v}): score > mean of the others + ${v}`,
  },
  "above-std": {
    label: "mean + k std", setting: "k", start: 3, range: [0, 10],
    formula: (v) => `AboveStd(k=${v}): score > mean + ${v} standard deviations`,
  },
  "soft-sigmoid": {
    label: "soft sigmoid", setting: "alpha", start: 5, range: [0.05, 20],
    formula: (v) => `SoftSigmoid(alpha=${v}): sigmoid(${v} (score - mean - ${STEEPNESS} std)) > 0.5; alpha sets the slope of the weights, and changes no sink`,
  },
  "top-k": {
    label: "top k", setting: "k", start: 1, range: [1, 32],
    formula: (v) => `TopK(k=${v}): the ${v} keys with the highest scores`,
  },
};

function threshold({ total, defined, std }, score, rule) {
  if (rule.name === "above-mean") {
    const others = defined - 1;
    return others < 1 ? NaN : Math.fround((total - score) / others + rule.value);
  }
  const mean = total / defined;
  if (std <= 1e-6 * Math.abs(mean)) return NaN;
  return Math.fround(mean + (rule.name === "soft-sigmoid" ? STEEPNESS : rule.value) * std);
}

// The sinks of a pattern at a step, strongest first: {key, score, threshold}.
function sinksOf(recorded, pattern, step, rule) {
  if (recorded.stored.has(rule.name)) return recorded.storedSinks(rule.name, pattern, step);
  const found = recorded.strongest(pattern, step);
  if (rule.name === "top-k") return found.slice(0, rule.value).map((entry) => ({ ...entry, threshold: NaN }));
  const summary = recorded.summary(pattern, step);
  const sinks = [];
  for (const entry of found) {
    const level = threshold(summary, entry.score, rule);
    // A lower score has a higher threshold, so that no key after the first that fails passes.
    if (!(entry.score > level)) break;
    sinks.push({ ...entry, threshold: level });
  }
  return sinks;
}

// The setting from which on (for top-k: up to which) all sinks are among the exactly known keys; null for any setting.
function limitOf(recorded, rule, step) {
  const { limits } = recorded.exactAt(step);
  return limits[rule.name === "soft-sigmoid" ? "above-std" : rule.name];
}

// Whether all sinks by this rule are known.
function findsAll(recorded, rule, step) {
  if (recorded.stored.has(rule.name)) return true;
  const limit = limitOf(recorded, rule, step);
  if (limit === null) return true;
  if (rule.name === "top-k") return rule.value <= limit;
  return (rule.name === "soft-sigmoid" ? STEEPNESS : rule.value) >= limit;
}

// The score that colours a sink: received attention, also where the rule reads something else.
function receivedScore(recorded, pattern, step, sink, rule) {
  if (!recorded.stored.has(rule.name)) return sink.score;
  const bin = recorded.bin(pattern, step, sink.key);
  return bin ? middle(bin) : 0;
}
