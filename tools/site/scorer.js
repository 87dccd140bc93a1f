// Sphinx's scores, weighted: guides before the reference, rows where a name was asked for; logs and other languages last.
let asked, words;
function ask(question) {
  asked = question.toLowerCase().trim();
  words = asked.split(/[^\p{Letter}\p{Number}_]+/u).filter((word) => word.length > 2).map((word) => word.replace(/(ing|ed|es|s)$/, ""));
}
ask(new URLSearchParams(location.search).get("q") || "");
const LAST = [/^(CHANGELOG|docs\/(log|decisions\/))/, /^docs\/huggingface\/(families|published)/, /\.zh$/];

function weightOf(docname, isRow) {
  if (LAST.some((each) => each.test(docname)) && !/[\u3000-\u9fff]/.test(asked)) return 0.1;
  if (docname.startsWith("api/")) return 0.2;
  return !isRow ? 1 : /^--|_/.test(asked) ? 2 : 0.4;
}

let keywords;
function keywordsOf(docname) {
  if (keywords === undefined) {
    keywords = {};
    for (const [entry, places] of Object.entries(Search._index.indexentries)) {
      for (const [file, , isMain] of places) {
        if (isMain) keywords[Search._index.docnames[file]] = `${keywords[Search._index.docnames[file]] ?? ""} ${entry.toLowerCase()}`;
      }
    }
  }
  return keywords[docname] ?? "";
}

var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const low = title.toLowerCase(), known = descr === null ? `${low} ${keywordsOf(docname)}` : low;
    const whole = low === asked || low.endsWith(`.${asked}`) || low.endsWith(` ${asked}`);
    return (score + 8 * words.filter((word) => known.includes(word)).length + (whole ? 20 : 0)) * weightOf(docname, descr !== null);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};

// Where only logs have every word, or nothing has, pages that have all but one or two, at least half.
const strict = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) => {
  const found = strict(terms, excluded);
  let parts = [[...terms]];
  for (let left = terms.size - 1; left >= Math.max(terms.size / 2, terms.size - 2); left--) {
    if (!found.every(([docname]) => LAST.some((each) => each.test(docname)))) break;
    parts = parts.flatMap((part) => part.map((word) => part.filter((each) => each !== word)));
    found.push(...parts.flatMap((part) => strict(new Set(part), excluded)));
  }
  return found;
};

// A page that was opened from a folder may not read others: the texts of results lie in a script.
window.fetch = async (address) => new Response(TEXTS[decodeURI(address).slice(2, -".html".length)] ?? "");
Search.htmlToText = (text) => text;
