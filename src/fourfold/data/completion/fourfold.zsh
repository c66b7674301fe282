#compdef fourfold
_fourfold() {
    local -a found
    found=("${(@f)$("${words[1]/#\~/$HOME}" completion words \
        "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then
        compadd -a found
    else
        _files
    fi
}
if [[ "${funcstack[1]}" == _fourfold ]]; then
    _fourfold "$@"
else
    compdef _fourfold fourfold
fi
