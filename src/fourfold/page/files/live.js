"use strict";
// A store that is being filled: new runs appear while the page is open.
const ASK_EVERY_MS = 2000;
let known = null;

const look = async () => {
  try {
    const state = JSON.stringify(await (await fetch("/runs/state")).json());
    if (known !== null && state !== known) F.update(await (await fetch("/runs/data")).json());
    known = state;
    F.$("about").classList.remove("warn");
  } catch {
    F.$("about").textContent = "The server does not answer; these are the runs it had.";
    F.$("about").classList.add("warn");
  }
  setTimeout(look, ASK_EVERY_MS);
};
look();
