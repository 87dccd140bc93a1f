// Sphinx's scores, weighted: guides before the reference, rows where a name was asked for; logs and other languages last.
let asked, words;
function ask(question) {
  asked = question.toLowerCase().trim();
  words = asked.split(/[^\p{Letter}\p{Number}_]+/u).filter((word) => word.length > 2).map((word) => word.replace(/(ing|ed|es|s)$/, ""));
}
ask(new URLSearchParams(location.search).get("q") || "");
const LAST = [/^(CHANGELOG|docs\/(log|decisions\/))/, /^docs\/huggingface\/(families|published)/, /\.zh$/];

const isLast = (docname) => LAST.some((each) => each.test(docname)) && !/[\u3000-\u9fff]/.test(asked);

function weightOf(docname, isRow) {
  if (isLast(docname)) return 0.1;
  if (docname.startsWith("api/")) return 0.2;
  return !isRow ? 1 : /^--|_/.test(asked) ? 2 : 0.4;
}

// The keywords of pages in contents.py, which are their main index entries: {docname: text}.
let keywords;
function keywordsOf() {
  if (keywords) return keywords;
  keywords = {};
  for (const [entry, places] of Object.entries(Search._index.indexentries)) {
    for (const [file, , isMain] of places) {
      const docname = Search._index.docnames[file];
      if (isMain) keywords[docname] = `${keywords[docname] ?? ""} ${entry}`;
    }
  }
  return keywords;
}

var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const low = title.toLowerCase(), others = keywordsOf()[docname] ?? "";
    const whole = low === asked || low.endsWith(`.${asked}`) || low.endsWith(` ${asked}`);
    const known = words.map((word) => (low.includes(word) ? 8 : others.includes(word) ? 4 : 0));
    return (score + known.reduce((sum, each) => sum + each, 0) + (whole ? 20 : 0)) * weightOf(docname, descr !== null);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};

// Pages that have every word, in their text or keywords; where no guide has, those with the most, or one word less.
const textSearch = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) => {
  const { docnames, titles, filenames } = Search._index;
  const found = new Map(); // by page: a result for each word that it has
  for (const term of terms) {
    const results = new Map(textSearch(new Set([term]), excluded).map((result) => [result[0], result]));
    for (const [name, text] of Object.entries(keywordsOf())) {
      const file = docnames.indexOf(name);
      if (text.includes(term) && !results.has(name)) results.set(name, [name, titles[file], "", null, Scorer.term, filenames[file], SearchResultKind.text]);
    }
    for (const [name, result] of results) found.set(name, [...(found.get(name) ?? []), result]);
  }
  const guides = [...found.keys()].filter((name) => !isLast(name) && !name.startsWith("api/"));
  const most = Math.max(0, ...(guides.length ? guides : [...found.keys()]).map((name) => found.get(name).length));
  const least = most === terms.size ? most : Math.max(1, most - 1);
  return [...found.values()].filter((results) => results.length >= least).map((results) => {
    const best = results.reduce((one, other) => (other[4] > one[4] ? other : one));
    return [...best.slice(0, 4), best[4] + 10 * (results.length - least), ...best.slice(5)];
  });
};

// A page that was opened from a folder may not read others: the texts of results lie in a script.
window.fetch = async (address) => new Response(TEXTS[decodeURI(address).slice(2, -".html".length)] ?? "");
Search.htmlToText = (text) => text;
