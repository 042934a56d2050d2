// The search box of the troubleshooting page: the sentence that shares most words with what was pasted.
(() => {
  const words = (text) => text.toLowerCase().match(/[a-z_][a-z_0-9]+/g) || [];

  function score(entry, pasted, weights) {
    let shared = 0;
    let total = 0;
    for (const word of entry.words) {
      const weight = weights.get(word);
      total += weight;
      if (pasted.has(word)) shared += weight;
    }
    return shared - 0.5 * (total - shared);
  }

  function start(box) {
    const errors = (window.dlmLensErrors || []).map(([text, link, title]) => ({ text, link, title, words: [...new Set(words(text))] }));
    const counts = new Map();
    for (const { words } of errors) for (const word of words) counts.set(word, (counts.get(word) || 0) + 1);
    const weights = new Map([...counts].map(([word, n]) => [word, Math.log(1 + errors.length / n)]));
    const list = document.getElementById("found-errors");
    const root = document.documentElement.dataset.content_root || "";
    box.addEventListener("input", () => {
      const pasted = new Set(words(box.value));
      const found = errors
        .map((entry) => [score(entry, pasted, weights), entry])
        .filter(([value]) => value > 1)
        .sort((a, b) => b[0] - a[0])
        .slice(0, 8);
      list.replaceChildren(
        ...found.map(([, { text, link, title }]) => {
          const item = document.createElement("li");
          const anchor = document.createElement("a");
          anchor.href = root + link;
          anchor.textContent = text;
          item.append(anchor, ` (${title})`);
          return item;
        }),
      );
      if (pasted.size > 1 && !found.length) {
        const item = document.createElement("li");
        item.textContent = "No sentence of the library shares these words; it may be one of torch, transformers, nnsight or TransformerLens.";
        list.append(item);
      }
    });
  }

  document.addEventListener("DOMContentLoaded", () => {
    const box = document.getElementById("find-error");
    if (box) start(box);
  });
})();
