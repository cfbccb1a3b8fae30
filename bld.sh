cd /tmp/pol/build/cp311*; nice -n -5 ninja _core 2>&1 | grep -E "error|warning: unused|FAILED" ; cp _core.cpython-311-x86_64-linux-gnu.so /tmp/pol/.venv/lib/python3.11/site-packages/kvdock/
bash /tmp/pol/ev.sh
