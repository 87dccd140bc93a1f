// Search, copy buttons, anchors of headings, sortable tables, and the menu of a phone. The index is read at the first search.
"use strict";
const home = document.documentElement.dataset.home;
const input = document.getElementById("search");
const list = document.getElementById("results");
let entries = null;
let selected = -1;

function searchEntries(rows) {
  entries = rows.map(([page, section, link, text]) => ({ page, section, link, text, low: text.toLowerCase(),
    title: section.toLowerCase(), whole: page.toLowerCase() }));
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
const ASKING = new Set("a an and are can do does for from how i in is it many much my of on or out the to what when where which why with".split(" "));

// Other projects' words, and those of these pages.
const OTHER_WORDS = { perplexity: "bits per byte", ppl: "bits per byte", oom: "memory", finetune: "fine-tuning", finetuning: "fine-tuning" };

function wordsOf(text) {
  const said = text.toLowerCase().split(/[\s?]+/).filter(Boolean);
  const all = said.flatMap((word) => (OTHER_WORDS[word] ?? word).split(" "));
  const asked = all.filter((word) => !ASKING.has(word));
  return asked.length ? asked : all;
}

function stemOf(word) {
  return word.length > 5 ? word.replace(/(ing|ed|es|s)$/, "") : word.length > 3 ? word.replace(/s$/, "") : word;
}

// Whether a word of the text begins with this; a long one may lie within another.
function holds(text, stem) {
  for (let at = text.indexOf(stem); at >= 0; at = text.indexOf(stem, at + 1)) {
    if (stem.length > 5 || at === 0 || !/[a-z0-9]/.test(text[at - 1])) return true;
  }
  return false;
}

function points(entry, word, alone) {
  const last = entry.title.split(".").pop().replace(/^-+/, "");
  const stem = stemOf(word);
  if (entry.title === word || last === word) return alone ? 60 : 35;
  if (last.startsWith(stem)) return 30;
  if (holds(entry.title, stem)) return 20;
  if (holds(entry.whole, stem)) return 10;
  return holds(entry.low, stem) ? 4 : 0;
}

// Fields, options and guides before internals; an entry needs half of the words, and rare ones count more.
function ranked(words, asked) {
  const rows = entries.map((entry) => words.map((word) => points(entry, word, words.length === 1)));
  const rarity = words.map((_, n) => Math.log(1 + entries.length / (1 + rows.filter((row) => row[n]).length)));
  const hits = [];
  rows.forEach((row, index) => {
    const entry = entries[index], found = row.filter(Boolean).length;
    if (!found || found < words.length / 2) return;
    let total = row.reduce((sum, each, n) => sum + each * rarity[n], 0) * (found / words.length) ** 2;
    if (words.length > 1 && asked.includes(" ") && entry.title.includes(asked)) total *= 2;
    else if (words.length > 1 && entry.low.includes(asked)) total *= 1.5;
    if (/CHANGELOG|docs\/(log|decisions)/.test(entry.link)) total *= 0.2;
    else if (!/^(docs\/|index)/.test(entry.link)) total *= 0.05;
    hits.push([total, entry]);
  });
  return hits.sort(([a], [b]) => b - a);
}

function marked(text, words) {
  const at = Math.max(0, Math.min(...words.map((word) => text.toLowerCase().indexOf(word)).filter((n) => n >= 0), text.length) - 40);
  const line = document.createElement("small");
  let rest = (at ? "… " : "") + text.slice(at, at + 130);
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
    link.append(where + entry.section, marked(entry.text, words));
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
});
const current = document.querySelector("#contents [aria-current]");
if (current && current.offsetParent) {
  const box = document.getElementById("contents");
  box.scrollTop = Math.max(0, current.offsetTop - box.clientHeight / 2);
}

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
