{{- define "kvdock.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "kvdock.selector" -}}
app.kubernetes.io/name: kvdock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvdock.labels" -}}
{{ include "kvdock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvdock.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default .appVersion }}{{ end }}
{{- end }}

{{- /* A probe over the Unix socket, which strangers cannot reach, of the path in `path`. */ -}}
{{- define "kvdock.probe" -}}
exec:
  command:
    - python
    - -ISc
    - 'import socket; s = socket.socket(socket.AF_UNIX); s.connect("{{ .folder }}/kvdock.sock");
      s.sendall(b"GET {{ .path }} HTTP/1.0\r\nHost: localhost\r\n\r\n");
      raise SystemExit(b" 200 " not in s.recv(64))'
{{- end }}
