// Follows a command: asks its server for the status, and replaces the page's content when there is a newer version.
(() => {
  "use strict";
  const PERIOD = 1000; // milliseconds; lab/live.py has the same
  const MAX_FAILURES = 3; // in a row; then the command has ended
  let failures = 0;

  const replaceContent = async (revision) => {
    const answer = await fetch("/content", { cache: "no-store" });
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    const opened = [...document.querySelectorAll("details[open][id]")].map((details) => details.id);
    const focused = document.activeElement?.id;
    for (const plot of document.querySelectorAll(".plot")) Plotly.purge(plot);
    for (const part of [".threads", ".wrap"]) document.querySelector(part).replaceWith(next.querySelector(part));
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
    document.title = next.title;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    const data = document.getElementById("figure-data"); // only pages that draw with a script have it
    if (data) data.textContent = next.getElementById("figure-data").textContent;
    document.body.dataset.revision = revision;
    dispatchEvent(new Event("heddle-content"));
  };

  const follow = async () => {
    try {
      const status = await (await fetch("/status.json", { cache: "no-store" })).json();
      failures = 0;
      if (String(status.revision) !== document.body.dataset.revision) await replaceContent(status.revision);
      if (status.is_complete) return;
    } catch {
      failures += 1;
      const note = document.getElementById("live-note");
      if (failures === MAX_FAILURES && note) note.textContent = note.dataset.ended;
      if (failures === MAX_FAILURES) return;
    }
    setTimeout(follow, PERIOD);
  };
  follow();
})();
