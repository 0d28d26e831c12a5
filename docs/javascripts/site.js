/* Wide tables scroll inside a box that the theme adds. With a tab stop it scrolls by keyboard too. */
const mark = () => document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => (box.tabIndex = 0));
new MutationObserver(mark).observe(document.body, { childList: true, subtree: true });
mark();
