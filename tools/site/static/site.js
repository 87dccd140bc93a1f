// Search, copy buttons, anchors of headings, sortable tables, and the menu of a phone. The index is read at the first search.
"use strict";
const home = document.documentElement.dataset.home;
const input = document.getElementById("site-search");
const list = document.getElementById("results");
let entries = null;
let selected = -1;

function searchEntries(rows) {
  entries = rows.map(([page, section, link, text, kind, keys]) => ({ page, section, link, text, kind, keys,
    low: text.toLowerCase(), title: section.toLowerCase(), whole: page.toLowerCase() }));
  show();
}

function load() {
  if (entries !== null || document.getElementById("index")) return;
  const script = document.createElement("script");
  script.id = "index";
  script.src = home + "/assets/search.js";
  document.head.append(script);
}

// Words that questions are asked with; a search for these alone looks for them.
const ASKING = new Set(("a an and are can do does for from get how i in is it many much my of on or out ran the to what when where " +
  "which why with").split(" "));

// What means the same here. Each row's members find each other; those of two words are found before single ones.
const SAME = [
  ["sliding window", "sliding windows", "local attention", "window"], ["mla", "latent_attention", "latent attention", "latent"], ["gqa", "grouped-query", "kv_heads", "key/value heads"],
  ["multi gpu", "multi-gpu", "several gpus", "multiple gpus", "ddp", "fsdp", "distributed", "ranks", "several processes"],
  ["tune", "tuning", "tuned", "hyperparameters", "own best"], ["out of memory", "oom", "does not fit", "too large"],
  ["kv cache", "kv-cache", "cache", "state"], ["checkpoint", "checkpoints", "files of a run"],
  ["log probabilities", "log probs", "logprob", "logprobs", "log-probabilities"], ["resume", "resuming", "continue a run"], ["perplexity", "ppl", "bits per byte"],
  ["fine-tuning", "fine-tune", "finetune", "finetuning", "adapters"], ["halve", "smaller", "shrink", "fewer"], ["position", "positions", "position encoding", "positional encoding"],
  ["add", "adding"], ["gguf", "llama.cpp"],
];
const PHRASES = SAME.flatMap((forms) => forms.map((form) => [form, forms])).sort(([a], [b]) => b.length - a.length);

// The words of a question, each with the others that mean the same.
function wordsOf(text) {
  let rest = ` ${text.toLowerCase().replace(/[\s?!,]+/g, " ").trim()} `;
  const words = [];
  for (const [form, forms] of PHRASES) {
    const at = rest.indexOf(` ${form} `);
    if (at < 0) continue;
    words.push([form, ...forms.filter((each) => each !== form)]);
    rest = rest.replace(` ${form} `, " ");
  }
  const others = rest.split(" ").filter(Boolean), asked = others.filter((word) => !ASKING.has(word));
  return [...words, ...(asked.length || words.length ? asked : others).map((word) => [word])];
}

function stemOf(word) {
  return word.length > 5 ? word.replace(/(ing|ed|es|s)$/, "") : word.length > 3 ? word.replace(/s$/, "") : word;
}

// 1 where the text has the word, 0.6 where it has a longer one that begins so, or in which a long one lies.
function holds(text, stem) {
  let best = 0;
  for (let at = text.indexOf(stem); at >= 0 && best < 1; at = text.indexOf(stem, at + 1)) {
    const starts = at === 0 || !/[a-z0-9]/.test(text[at - 1]);
    if (starts && /^(ing|ed|es|s|d)?([^a-z0-9]|$)/.test(text.slice(at + stem.length, at + stem.length + 4))) best = 1;
    else if (starts || stem.length > 5) best = 0.6;
  }
  return best;
}

function points(entry, forms) {
  const last = entry.title.split(".").pop().replace(/^-+/, "");
  return Math.max(...forms.map((form, n) => {
    const stem = stemOf(form), share = n ? 0.8 : 1;
    if (entry.title === form || last === form) return 50 * share;
    return share * Math.max(30 * holds(entry.title, stem), 30 * holds(entry.keys, stem), 10 * holds(entry.whole, stem),
      4 * holds(entry.low, stem));
  }));
}

// Pages before their sections, these before fields, options and families; internals come last.
const WEIGHTS = { page: 1.3, section: 1, row: 0.4, other: 0.05 };
function weightOf(entry, asked) {
  if (/CHANGELOG|docs\/(log|decisions)/.test(entry.link)) return 0.2;
  if (/huggingface\/(families|published)/.test(entry.link) && entry.kind !== "page") return 0.3;
  return entry.kind === "row" && /^--|_/.test(asked) ? 2 : WEIGHTS[entry.kind];
}

// An entry needs half of the words, and rare ones count more. Two of one page at most are among the first five.
function ranked(words, asked) {
  const chinese = /[\u3000-\u9fff]/.test(asked);
  const read = entries.filter((entry) => chinese || !/\.zh\.html/.test(entry.link));
  const rows = read.map((entry) => words.map((forms) => points(entry, forms)));
  const rarity = words.map((_, n) => Math.log(1 + read.length / (1 + rows.filter((row) => row[n]).length)));
  const hits = [];
  rows.forEach((row, index) => {
    const entry = read[index], found = row.filter(Boolean).length;
    if (!found || found < words.length / 2) return;
    let total = row.reduce((sum, each, n) => sum + each * rarity[n], 0) * (found / words.length) ** 2;
    if (asked.includes(" ") && entry.title.includes(asked)) total *= 2;
    else if (asked.includes(" ") && entry.low.includes(asked)) total *= 1.3;
    hits.push([total * weightOf(entry, asked), entry]);
  });
  hits.sort(([a], [b]) => b - a);
  const pages = new Map(), first = [];
  for (const hit of hits) {
    const page = hit[1].link.split("#")[0], count = pages.get(page) ?? 0;
    if (count < 2) first.push(hit);
    pages.set(page, count + 1);
    if (first.length === 5) break;
  }
  return [...first, ...hits.filter((hit) => !first.includes(hit))];
}

// 130 characters around the first word, from a whole word to a whole word.
function excerpt(text, words) {
  const low = text.toLowerCase(), found = words.map((word) => low.indexOf(word)).filter((n) => n >= 0);
  const near = Math.max(0, Math.min(...found, text.length) - 40), at = near && found.length ? text.lastIndexOf(" ", near) + 1 : 0;
  if (at + 130 >= text.length) return (at ? "… " : "") + text.slice(at);
  const end = text.lastIndexOf(" ", at + 130);
  return `${at ? "… " : ""}${text.slice(at, end > at ? end : at + 130)} …`;
}

function marked(text, words) {
  const line = document.createElement("small");
  let rest = excerpt(text, words);
  while (rest) {
    const hits = words.map((word) => [rest.toLowerCase().indexOf(word), word.length]).filter(([n]) => n >= 0);
    if (!hits.length) break;
    const [start, length] = hits.reduce((a, b) => (b[0] < a[0] ? b : a));
    const mark = document.createElement("mark");
    mark.textContent = rest.slice(start, start + length);
    line.append(rest.slice(0, start), mark);
    rest = rest.slice(start + length);
  }
  line.append(rest);
  return line;
}

function show() {
  const words = wordsOf(input.value);
  list.hidden = !words.length || entries === null;
  input.setAttribute("aria-expanded", String(!list.hidden));
  input.removeAttribute("aria-activedescendant");
  selected = -1;
  if (list.hidden) return;
  const hits = ranked(words, input.value.trim().toLowerCase());
  list.replaceChildren(...hits.slice(0, 20).map(([, entry], index) => {
    const item = document.createElement("li");
    item.setAttribute("role", "option");
    item.id = "result-" + index;
    const link = document.createElement("a");
    link.href = home + "/" + entry.link;
    link.tabIndex = -1;
    const where = entry.section.startsWith(entry.page) ? "" : entry.page + ": ";
    link.append(where + entry.section, marked(entry.text, words.flat()));
    item.append(link);
    return item;
  }));
  if (!hits.length) {
    const nothing = document.createElement("p");
    nothing.textContent = "Nothing has these words.";
    list.replaceChildren(nothing);
  }
}

function select(step) {
  const items = [...list.querySelectorAll("li")];
  if (!items.length) return;
  selected = (selected + step + items.length) % items.length;
  items.forEach((item, index) => item.setAttribute("aria-selected", String(index === selected)));
  items[selected].scrollIntoView({ block: "nearest" });
  input.setAttribute("aria-activedescendant", items[selected].id);
}

input.addEventListener("focus", load);
input.addEventListener("input", () => { load(); show(); });
input.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    select(event.key === "ArrowDown" ? 1 : -1);
  } else if (event.key === "Enter") {
    const link = list.querySelectorAll("li a")[Math.max(0, selected)];
    if (link) link.click();
  } else if (event.key === "Escape") {
    input.value = "";
    show();
    input.blur();
  }
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".search") || event.target.closest("#results a")) list.hidden = true;
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    input.focus();
  }
});

const menu = document.getElementById("menu");
menu.addEventListener("click", () => {
  const open = document.getElementById("contents").classList.toggle("open");
  menu.setAttribute("aria-expanded", String(open));
  showCurrent();
});

// The page's own line, in the middle of the menu.
function showCurrent() {
  const box = document.getElementById("contents"), current = box.querySelector("[aria-current]");
  if (current && current.offsetParent) {
    box.scrollTop += current.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
  }
}
showCurrent();

for (const heading of document.querySelectorAll("main :is(h2, h3, h4)[id]")) {
  const link = document.createElement("a");
  link.className = "anchor";
  link.href = "#" + heading.id;
  link.textContent = "#";
  link.setAttribute("aria-label", "Link to this section");
  heading.append(link);
}

for (const block of document.querySelectorAll("pre.code[data-language]")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const text = block.querySelector("code").textContent;
    await navigator.clipboard.writeText(block.dataset.language === "console" ? text.replace(/^\$ /gm, "") : text);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  block.append(button);
}

function number(text) {
  const value = parseFloat(text.replace(/[,\s]/g, "").replace("−", "-"));
  return Number.isNaN(value) ? null : value;
}

for (const table of document.querySelectorAll("main table.data")) {
  const body = table.tBodies[0];
  if (!table.tHead || !body || body.rows.length < 3) continue;
  table.classList.add("sortable");
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [row, row.cells[column] ? row.cells[column].innerText.trim() : ""]);
      rows.sort(([, a], [, b]) => {
        const [x, y] = [number(a), number(b)];
        const order = x !== null && y !== null ? x - y : a.localeCompare(b);
        return down ? -order : order;
      });
      body.append(...rows.map(([row]) => row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
