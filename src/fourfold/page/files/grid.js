"use strict";
// A table that is sorted by its headings and turned page by page: thousands of rows stay cheap.
F.Grid = class {
  /** options: caption, perPage, onsort, onpage, action(row) -> element for the first cell. */
  constructor(place, options) {
    Object.assign(this, { options, at: 0, sort: null, rows: [], columns: [], perPage: options.perPage || 50 });
    this.head = F.h("tr");
    this.body = F.h("tbody");
    this.count = F.h("span", { role: "status" });
    this.back = F.h("button", { type: "button", onclick: () => this.turn(-1) }, "Previous");
    this.next = F.h("button", { type: "button", onclick: () => this.turn(1) }, "Next");
    this.pager = F.h("div", { class: "pager" }, this.back, this.next, this.count);
    const table = F.h("table", {}, F.h("caption", { class: "sr" }, options.caption), F.h("thead", {}, this.head), this.body);
    place.append(F.h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": options.caption }, table), this.pager);
  }

  /** columns: [{heading}]; rows: [{cells: texts, values, ...}] */
  show(columns, rows) {
    const same = columns.length === this.columns.length && columns.every((one, i) => one.heading === this.columns[i].heading);
    this.columns = columns;
    this.rows = rows;
    if (!same) {
      this.sort = null;
      this.numeric = columns.map((_, i) => rows.some((row) => typeof row.values[i] === "number"));
      this.headings();
    }
    this.order();
  }

  headings() {
    this.cells = this.columns.map((column, i) => {
      const button = F.h("button", { type: "button", onclick: () => this.sortBy(i) }, column.heading);
      return F.h("th", { scope: "col", class: this.numeric[i] ? "number" : null, "aria-sort": "none" }, button);
    });
    F.fill(this.head, ...this.cells);
  }

  sortBy(i, descending) {
    const again = this.sort && this.sort.i === i;
    this.sort = { i, down: descending ?? (again ? !this.sort.down : false) };
    this.cells.forEach((cell, place) => cell.setAttribute("aria-sort", place !== i ? "none" : this.sort.down ? "descending" : "ascending"));
    this.order();
    if (this.options.onsort) this.options.onsort();
  }

  order() {
    if (this.sort) {
      const { i, down } = this.sort;
      const blank = (value) => value === null || value === undefined || value === "";
      const key = (row) => row.values[i];
      this.rows = [...this.rows].sort((one, other) => {
        const a = key(one), b = key(other);
        if (blank(a) || blank(b)) return blank(a) - blank(b); // what is unknown comes last, either way
        const less = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
        return down ? -less : less;
      });
    }
    this.at = 0;
    this.page();
  }

  turn(by) {
    this.at += by;
    this.page();
  }

  get shown() { return this.rows.slice(this.at * this.perPage, (this.at + 1) * this.perPage); }

  page() {
    const pages = Math.max(1, Math.ceil(this.rows.length / this.perPage));
    this.at = Math.min(Math.max(this.at, 0), pages - 1);
    F.fill(this.body, ...this.shown.map((row) => this.line(row)));
    this.back.disabled = this.at === 0;
    this.next.disabled = this.at === pages - 1;
    this.back.hidden = this.next.hidden = pages === 1;
    const first = this.at * this.perPage;
    this.count.textContent = pages === 1 ? F.plural(this.rows.length, "row") : `rows ${F.number(first + 1)} to ${F.number(first + this.shown.length)} of ${F.number(this.rows.length)}`;
    if (this.options.onpage) this.options.onpage();
  }

  line(row) {
    const cells = row.cells.map((text, i) => {
      const content = i === 0 && this.options.action ? this.options.action(row, text) : text;
      return F.h("td", { class: this.numeric[i] ? "number" : null, title: String(text).length > 40 ? text : null }, content);
    });
    const line = F.h("tr", { class: row.chosen ? "chosen" : null }, ...cells);
    if (row.id !== undefined) line.dataset.row = row.id;
    return line;
  }
};
