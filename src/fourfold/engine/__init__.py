"""Run: the only folder that imports torch. Started by `launch`, spoken to through two files."""
