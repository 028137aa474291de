// Submits the form after a moment, unless the user has pressed "Stop here".
const form = document.querySelector("form[data-outbox-bulk-action]");
const timer = setTimeout(() => form.requestSubmit(), 300);
form.querySelector("a").addEventListener("click", () => clearTimeout(timer));
