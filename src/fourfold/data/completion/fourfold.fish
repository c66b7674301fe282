function __fourfold_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    test (count $current) -eq 0; and set current ''
    $before[1] completion words $before[2..-1] $current 2>/dev/null
end
complete -c fourfold -f -n 'count (__fourfold_complete) >/dev/null' -a '(__fourfold_complete)'
