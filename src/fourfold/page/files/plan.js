"use strict";
// The page of one plan.
const plan = F.data;
F.$("title").textContent = plan.title;
F.$("answer").textContent = plan.sentence;
F.$("made").textContent = `Made by fourfold ${plan.version}`;
F.fill(F.$("tiles"), ...F.planTiles(plan));
const planCard = (id, wide) => {
  const card = F.h("section", { class: wide ? "card wide" : "card", id });
  F.$("charts").append(card);
  return card;
};
const tall = plan.rows.length > 6 ? "high" : "";
new F.Chart(planCard("steps"), "Seconds per step", () => F.stepChart(plan), { size: tall });
new F.Chart(planCard("memory"), "Memory against the limit", () => F.planMemory(plan), { size: tall });
if (plan.sizes.length > 1) new F.Chart(planCard("sizes", plan.rows.length > 0), "Seconds against GPUs", () => F.planSizes(plan), {});
if (!plan.timeline && plan.rows.length) new F.Chart(planCard("one-step", true), "One step of #1", () => F.oneStep(plan.rows[0]), { size: "low" });
if (plan.timeline) new F.Chart(planCard("timeline", true), "Pipeline of #1", () => F.timeline(plan.timeline, ""), {});
F.planGrid(new F.Grid(F.$("grid"), { caption: "Ranked layouts", perPage: 50 }), plan);
const terms = (pairs) => F.h("dl", { class: "terms" }, ...pairs.flatMap(([name, text]) => [F.h("dt", {}, name), F.h("dd", {}, text)]));
F.fill(F.$("facts"), terms(plan.facts));
F.fill(F.$("words"), terms(plan.words));
F.engineGrid(new F.Grid(F.$("engine-grid"), { caption: "The best layout of each engine", perPage: 20 }), plan);
F.$("engines").hidden = !plan.engines.some((one) => one.choice);
F.$("order").hidden = plan.rows.length < 2;
F.$("words").closest("section").hidden = !plan.words.length;
for (const id of ["ranking", "charts"]) F.$(id).hidden = !plan.rows.length;
F.fill(F.$("flips"), F.planFlips(plan));
F.planRemarks(plan);
F.fill(F.$("command"), F.copyable("The command that gives this answer", plan.command));
F.fill(F.$("exports"), ...plan.exports.map((one) => {
  const said = one.said.map((text) => F.h("p", { class: "note" }, text));
  const text = one.script ? F.copyable(`Settings for ${one.engine}`, one.script) : null;
  return F.h("details", {}, F.h("summary", {}, one.script ? one.engine : `${one.engine}: not possible`), ...said, text);
}));
F.theme.start();
