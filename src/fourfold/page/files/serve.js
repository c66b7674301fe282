"use strict";
// The planner: the form asks, htmx fetches, what comes back is drawn.
const form = F.$("form");
const choices = (id, values) => F.fill(F.$(id), ...values.map(([value, text]) => F.h("option", { value }, text)));
const same = (values) => values.map((value) => [value, value]);
choices("model", same(F.data.models));
choices("gpu", [["", "none"], ...same(F.data.gpus)]);
choices("cluster", [["", "none"], ...same(F.data.clusters)]);
choices("stack", [["", "compare all"], ...same(F.data.stacks)]);
choices("precision", [["", "usual"], ...same(F.data.precisions)]);
choices("dispatcher", [["", "usual"], ...same(F.data.dispatchers)]);
choices("routing", [["", "usual"], ...same(F.data.routings)]);
choices("recompute", [["", "any"], ...same(F.data.recompute)]);
F.$("view").value = crypto.getRandomValues(new Uint32Array(2)).join("-");
F.$("made").textContent = `fourfold ${F.data.version}; nothing leaves this machine`;
F.fill(F.$("nav"), ...[["has_runs", "/runs", "Runs"], ["has_train", "/train", "Training"]].filter(([key]) => F.data[key]).map(([, address, name]) => F.h("a", { href: address }, name)));

const start = { model: "llama-3.1-70b", gpu: "h100-80gb", gpus: "512", seq_len: "8192", global_batch: "1024", stack: "megatron" };
const asked = new URLSearchParams(location.search);
const given = [...asked.keys()].some((key) => key !== "token");
for (const field of form.elements) {
  if (!field.name || field.name === "view") continue;
  const value = given ? asked.get(field.name) : start[field.name];
  if (field.type === "checkbox") field.checked = value === "1";
  else field.value = value ?? "";
}
if (["layout", "micro_batch", "recompute", "where", "safe", "explore", "config"].some((name) => asked.get(name))) F.$("rest").open = true;
if (["ep", "etp", "dispatcher", "routing", "imbalance", "capacity"].some((name) => asked.get(name))) F.$("experts").open = true;
if (["network", "tokens", "price", "days", "cluster_file"].some((name) => asked.get(name))) F.$("money").open = true;
F.$("cluster-upload").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  F.$("cluster_file").value = (await file.text()).slice(0, 100000);
  F.$("gpu").value = F.$("cluster").value = "";
  htmx.trigger(form, "submit");
});
F.$("cluster_file").addEventListener("input", () => { if (F.$("cluster_file").value.trim()) F.$("gpu").value = F.$("cluster").value = ""; });
// A cluster says which GPU it has.
F.$("cluster").addEventListener("input", () => { if (F.$("cluster").value) F.$("gpu").value = ""; });
F.$("gpu").addEventListener("input", () => { if (F.$("gpu").value) F.$("cluster").value = ""; });

/** The address that leads to this view. */
F.link = () => {
  const values = [...new FormData(form)].filter(([name, value]) => name !== "view" && value !== "");
  return `${location.origin}/?${new URLSearchParams(values)}`;
};

F.plan = { rows: [], headings: [], cells: [], flips: [], engines: [], memory_bytes: 0, sentence: "" };
const cardOf = (id) => {
  const card = F.h("section", { class: "card", id });
  F.$("charts").append(card);
  return card;
};
new F.Chart(cardOf("steps"), "Seconds per step", () => F.stepChart(F.plan), { size: "high" });
new F.Chart(cardOf("memory"), "Memory against the limit", () => F.planMemory(F.plan), { size: "high" });
F.engines = new F.Grid(F.$("engine-grid"), { caption: "The best layout of each engine", perPage: 20 });
F.grid = new F.Grid(F.$("grid"), { caption: "Ranked layouts", perPage: 50 });

F.showPlan = (plan) => {
  F.plan = plan;
  F.$("answer").textContent = plan.sentence;
  F.$("deadline").textContent = plan.deadline || "";
  for (const id of ["charts", "ranking", "order", "rests"]) F.$(id).hidden = !plan.rows.length; // there is nothing to show
  F.fill(F.$("tiles"), ...F.planTiles(plan));
  F.$("engines").hidden = !plan.engines.some((one) => one.choice);
  F.engineGrid(F.engines, plan);
  F.planGrid(F.grid, plan);
  F.planRemarks(plan);
  F.fill(F.$("flips"), F.planFlips(plan));
  F.fill(F.$("again"), F.copyable("Command", plan.command), F.copyable("Link to this view", F.link()));
  document.documentElement.dataset.full = plan.full ? "yes" : "";
  F.redraw();
};

document.addEventListener("htmx:afterSwap", () => {
  const block = F.$("plan-data"), problem = F.$("problem");
  if (block) F.showPlan(JSON.parse(block.textContent));
  if (problem) F.$("answer").textContent = "";
  history.replaceState(null, "", F.link());
});
document.addEventListener("htmx:sendError", () => { F.fill(F.$("result"), F.h("p", { class: "warn", role: "alert", id: "problem" }, "The server does not answer; is it still running?")); });
document.addEventListener("htmx:beforeRequest", () => { document.documentElement.dataset.full = ""; });
F.theme.start();
document.addEventListener("DOMContentLoaded", () => htmx.trigger(form, "submit"));
