// Sphinx's scores, weighted: guides before the reference, rows where a name was asked for; logs and translations last.
let asked, words;
function wordsOf(text) {
  const all = text.toLowerCase().split(/[^\p{Letter}\p{Number}_]+/u).filter(Boolean);
  return all.map((word) => (word.length > 4 ? word.replace(/(ings?|ed|es|s)$/, "") : word));
}
function ask(question) {
  asked = question.toLowerCase().trim();
  words = wordsOf(asked);
}
ask(new URLSearchParams(location.search).get("q") || "");
const LAST = [/^(CHANGELOG|docs\/(log|decisions\/))/, /^docs\/huggingface\/(families|published)/, /\.zh$/];

const isLast = (docname) => LAST.some((each) => each.test(docname)) && !/[\u3000-\u9fff]/.test(asked);

function weightOf(docname, isRow, isNamed) {
  if (isLast(docname) && !isNamed) return 0.1;
  if (docname.startsWith("api/")) return 0.2;
  return !isRow ? 1 : /^--|_/.test(asked) ? 2 : 0.4;
}

var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const low = title.toLowerCase();
    const whole = low === asked || low.endsWith(`.${asked}`) || low.endsWith(` ${asked}`);
    const named = words.filter((word) => word.length > 2 && low.includes(word)).length;
    return (score + 8 * named + (whole ? 20 : 0)) * weightOf(docname, descr !== null, kind === "index");
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};

// Pages whose keywords (tools/site/contents.py) are all among the words asked; and pages with every word or, where no
// guide has, those with the most, or one word less.
const textSearch = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) => {
  const { docnames, titles, filenames, indexentries } = Search._index;
  const named = Object.entries(indexentries).flatMap(([entry, places]) => {
    const all = wordsOf(entry).every((word) => words.includes(word));
    const main = all ? places.filter(([, , isMain]) => isMain) : [];
    const score = 25 + 5 * wordsOf(entry).length;
    return main.map(([file]) => [docnames[file], titles[file], "", null, score, filenames[file], "index"]);
  });
  const found = new Map(); // by page: a result for each word that it has
  for (const term of terms) {
    const results = new Map(textSearch(new Set([term]), excluded).map((result) => [result[0], result]));
    for (const [name, result] of results) found.set(name, [...(found.get(name) ?? []), result]);
  }
  const guides = [...found.keys()].filter((name) => !isLast(name) && !name.startsWith("api/"));
  const most = Math.max(0, ...(guides.length ? guides : [...found.keys()]).map((name) => found.get(name).length));
  const least = most === terms.size ? most : Math.max(1, most - 1);
  const pages = [...found.values()].filter((results) => results.length >= least).map((results) => {
    const best = results.reduce((one, other) => (other[4] > one[4] ? other : one));
    return [...best.slice(0, 4), best[4] + 10 * (results.length - least), ...best.slice(5)];
  });
  return [...named, ...pages];
};

// A page that was opened from a folder may not read others: their paragraphs lie in a script.
window.fetch = async (address) => new Response((TEXTS[decodeURI(address).slice(2, -".html".length)] ?? []).join("\n"));

const SHOWN = 240;
Search.makeSearchSummary = (texts, keywords) => {
  const first = (text) => [...keywords].map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
  const best = texts.split("\n").reduce((best, text) => (first(text).length > first(best).length ? text : best));
  const from = best.length > SHOWN ? Math.min(...first(best), best.length) - SHOWN / 4 : 0;
  const start = from > 0 ? best.lastIndexOf(" ", from) + 1 : 0;
  const summary = document.createElement("p");
  summary.classList.add("context");
  summary.textContent =
    (start ? "… " : "") + best.slice(start, start + SHOWN).trim() + (start + SHOWN < best.length ? " …" : "");
  return summary;
};
